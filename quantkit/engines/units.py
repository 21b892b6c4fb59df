"""Which matrices an engine makes of a checkpoint's linears, and what of each lies on one tensor-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantkit.engines.base import Split, Unit

Shape = tuple[int, int]  # out_features, in_features

# Linears with these last names in one module become one matrix: the packed_modules_mapping of vLLM's models, whose
# names SGLang, TGI and TensorRT-LLM use too.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# What engines divide along in_features: the linear that ends an attention or feed-forward module.
ROW = frozenset(("o_proj", "out_proj", "down_proj", "wo", "w2", "dense", "dense_4h_to_h", "c_proj", "fc2", "fc_out"))
# Small or shared inputs of multi-head latent attention, and routers, are held whole by every rank.
REPLICATED = frozenset(("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj", "gate", "router", "shared_expert_gate"))
STORED_QKV = frozenset(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack"))
COLUMN = STORED_QKV | {
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("w1", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
}
_EXPERT = re.compile(r"^(.+\.experts)\.\d+\.([^.]+)$")
_EXPERT_ROW = frozenset(("w2", "down_proj", "fc2"))


def build_units(shapes: Mapping[str, Shape], config: Mapping[str, Any], *, tp: int, fuses: bool = True) -> list[Unit]:
    """Fuse and divide.

    Args:
        shapes: {linear: (out_features, in_features)}.
        config: config.json, for its head counts.
        tp: tensor-parallel ranks.
        fuses: whether the engine makes one matrix of q, k and v, and so on.
    """
    sizes = text_config(config)
    units: list[Unit] = []
    experts: dict[tuple[str, bool], list[str]] = {}
    done: set[str] = set()
    for name in shapes:
        found = _EXPERT.match(name) if fuses else None
        if found:
            experts.setdefault((found[1], found[2] in _EXPERT_ROW), []).append(name)
        elif name not in done:
            fused, names = _siblings(name, shapes) if fuses else (name, [name])
            done.update(names)
            units.append(_unit(fused, names, shapes, sizes, tp))
    return units + [_experts(prefix, down, names, shapes, tp) for (prefix, down), names in experts.items()]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model, over the rest."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _siblings(name: str, shapes: Mapping[str, Shape]) -> tuple[str, list[str]]:
    """The fused matrix that a linear is a part of, and all its parts that exist."""
    prefix, dot, leaf = name.rpartition(".")
    for fused, members in FUSED.items():
        if leaf in members:
            names = [f"{prefix}{dot}{member}" for member in members if f"{prefix}{dot}{member}" in shapes]
            one_input = len({shapes[each][1] for each in names}) == 1
            if len(names) > 1 and one_input:
                return f"{prefix}{dot}{fused}", names
    return name, [name]


def _unit(name: str, names: Sequence[str], shapes: Mapping[str, Shape], config: Mapping[str, Any], tp: int) -> Unit:
    columns = shapes[names[0]][1]
    split = _split(name.rpartition(".")[2], shapes[names[0]], config)
    whole = tuple(part for each in names for part in _stored_parts(each, shapes[each][0], config))
    unit = Unit(name, tuple(names), whole, columns, columns, split, 1 if split == Split.REPLICATED else tp)
    if unit.ranks == 1:
        return unit
    if split == Split.ROW:
        return _row(unit)
    heads = [count for each in names for count in _heads(each.rpartition(".")[2], config)]
    parts = []
    for index, rows in enumerate(whole):
        count, repeats = heads[index] if len(heads) == len(whole) else (None, False)
        if count and rows % count == 0:  # whole heads on every rank
            if repeats and count < tp and tp % count == 0:
                parts.append(rows // count)
                continue
            if count % tp:
                return replace(unit, problem=f"{count} heads do not divide between {tp} ranks")
        if rows % tp:
            return replace(unit, problem=f"{rows:,} output features do not divide between {tp} ranks")
        parts.append(rows // tp)
    return replace(unit, parts=tuple(parts))


def _heads(leaf: str, config: Mapping[str, Any]) -> list[tuple[int | None, bool]]:
    """Heads of each part of a linear, and whether fewer of them than ranks are repeated, as key heads are."""
    query = (config.get("num_attention_heads"), False)
    key = (config.get("num_key_value_heads") or query[0], True)
    if leaf in STORED_QKV:
        return [query, key, key]
    if leaf in ("k_proj", "v_proj"):
        return [key]
    return [query if leaf == "q_proj" else (None, False)]


def _stored_parts(name: str, rows: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What a matrix that is fused in the checkpoint already consists of."""
    leaf = name.rpartition(".")[2]
    heads = config.get("num_attention_heads") or 0
    kv = config.get("num_key_value_heads") or heads
    if leaf in STORED_QKV and heads and rows % (heads + 2 * kv) == 0:
        head = rows // (heads + 2 * kv)
        return heads * head, kv * head, kv * head
    if leaf == "gate_up_proj" and rows % 2 == 0:
        return rows // 2, rows // 2
    return (rows,)


def _row(unit: Unit) -> Unit:
    """Divide the inputs."""
    if unit.in_features % unit.ranks:
        return replace(unit, problem=f"{unit.in_features:,} input features do not divide between {unit.ranks} ranks")
    return replace(unit, in_features=unit.in_features // unit.ranks)


def _split(leaf: str, shape: Shape, config: Mapping[str, Any]) -> Split:
    if leaf in REPLICATED:
        return Split.REPLICATED
    if leaf in ROW:
        return Split.ROW
    if leaf in COLUMN or leaf in FUSED:
        return Split.COLUMN
    # an unknown name: what comes back to the hidden size from another width ends a module
    hidden = config.get("hidden_size")
    return Split.ROW if shape[0] == hidden != shape[1] else Split.COLUMN


def _experts(prefix: str, down: bool, names: Sequence[str], shapes: Mapping[str, Shape], tp: int) -> Unit:
    """The experts of a layer; engines hold them as two stacks, w13 and w2, divided along the width between them."""
    first = names[0].rpartition(".")[0]
    members = [name for name in names if name.rpartition(".")[0] == first]
    rows = tuple(shapes[name][0] for name in members)
    columns = shapes[members[0]][1]
    split = Split.ROW if down else Split.COLUMN
    unit = Unit(f"{prefix}.{'w2' if down else 'w13'}", tuple(names), rows, columns, columns, split, tp, experts=True)
    if down:
        return _row(unit)
    if any(row % tp for row in rows):
        return replace(unit, problem=f"{rows[0]:,} output features do not divide between {tp} ranks")
    return replace(unit, parts=tuple(row // tp for row in rows))
