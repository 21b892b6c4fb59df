"""What a checkpoint is made of: blocks, linears, shared inputs, proved folds; an artifact's schemes and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.blocks.block import Block
from quantkit.blocks.probe import Probe, Prober
from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.checkpoint.hub import resolve_model
from quantkit.events import Emit, ignore
from quantkit.group import LinearGroup
from quantkit.units import gigabytes
from quantkit.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        model_type: as config.json names it.
        blocks: decoder blocks, and the module path of their list.
        structures: each distinct block structure: the indices of its blocks, and its probe.
        bytes_by_kind: stored bytes of packed codes, scales, zero points and everything else.
        schemes: {scheme: linears} of an artifact; empty for a plain checkpoint.
        dtypes: {safetensors dtype: tensors}.
    """

    path: str
    model_type: str
    blocks: int
    blocks_path: str
    structures: tuple[tuple[tuple[int, ...], Probe], ...]
    format: str | None
    schemes: dict[str, int]
    bytes_by_kind: dict[str, int]
    dtypes: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return {
            "path": self.path,
            "model_type": self.model_type,
            "blocks": {"count": self.blocks, "path": self.blocks_path},
            "structures": [
                {
                    "blocks": list(indices),
                    "groups": [_group_json(group) for group in probe.groups],
                    "rejected_folds": [
                        {"producer": r.producer, "linears": list(r.names), "evidence": r.evidence}
                        for r in probe.rejected
                    ],
                    "unreached": list(probe.unused),
                }
                for indices, probe in self.structures
            ],
            "format": self.format,
            "schemes": self.schemes,
            "bytes": self.bytes_by_kind,
            "dtypes": self.dtypes,
        }

    def summary(self) -> list[str]:
        """The findings as lines."""
        total = sum(self.bytes_by_kind.values())
        kinds = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in self.bytes_by_kind.items() if size)
        where = f"{self.blocks} blocks at `{self.blocks_path}`"
        lines = [f"{self.path}: {self.model_type}, {where}, {gigabytes(total)} ({kinds})"]
        if self.format:
            lines += [f"  {self.format}: {count} linears {scheme}" for scheme, count in self.schemes.items()]
        for indices, probe in self.structures:
            lines.append(f"blocks {_ranges(indices)}")
            for group in probe.groups:
                reads = ", ".join(group.names)
                lines.append(
                    f"  {reads}: share {group.in_features:,} inputs"
                    if len(group.names) > 1
                    else f"  {reads}: {group.in_features:,} inputs"
                )
                lines.append(f"    {_fold_line(group, probe)}")
            if probe.unused:
                lines.append(f"  not reached by the probe: {', '.join(probe.unused)}")
        return lines


def inspect(path: str | Path, *, trust_remote_code: bool = False, emit: Emit = ignore) -> Inspection:
    """Examine a checkpoint or artifact: its headers, and one block per block structure on a few random tokens.

    Raises:
        CheckpointError: it cannot be read, or the model cannot be built.
    """
    source = WeightSource.open(resolve_model(str(path), emit=emit))
    directory = source.checkpoint.path
    skeleton = build_skeleton(directory, source.tensors, trust_remote_code=trust_remote_code)
    return Inspection(
        path=str(path),
        model_type=str(source.checkpoint.config.get("model_type", "unknown")),
        blocks=len(skeleton.blocks),
        blocks_path=skeleton.blocks[0].path.rpartition(".")[0],
        structures=_structures(skeleton, source),
        format=source.format.name if source.format else None,
        schemes=_count(str(scheme) for scheme in source.schemes.values()),
        bytes_by_kind=source.bytes_by_kind(),
        dtypes=_count(info.dtype for info in source.checkpoint.tensors.values()),
    )


@torch.no_grad()
def _structures(skeleton: Skeleton, source: WeightSource) -> tuple[tuple[tuple[int, ...], Probe], ...]:
    outer = {name: source.read([tensor], torch.float32)[tensor] for name, tensor in skeleton.outer.items()}
    prober = Prober(skeleton, outer)
    members: dict[Any, list[int]] = {}
    for block in skeleton.blocks:
        members.setdefault(block.structure(), []).append(block.index)
    found = []
    for indices in members.values():
        block = skeleton.blocks[indices[0]]

        def weights(block: Block = block) -> dict[str, torch.Tensor]:
            return source.read_for(block.module, block.tensors, torch.float32)

        found.append((tuple(indices), prober.probe(block, weights)))
    return tuple(found)


def _count(items: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def _group_json(group: LinearGroup) -> dict[str, Any]:
    fold = group.fold
    return {
        "linears": list(group.names),
        "in_features": group.in_features,
        "scope": group.scope,
        "mixes_tokens": group.mixes_tokens,
        "fold": fold
        and {
            "producer": fold.producer,
            "kind": str(fold.kind),
            "start": fold.start,
            "channels": fold.channels,
            "repeat": fold.repeat,
            "evidence": fold.evidence,
        },
    }


def _fold_line(group: LinearGroup, probe: Probe) -> str:
    fold = group.fold
    if fold:
        shared = f", one scale per {fold.repeat} heads" if fold.repeat > 1 else ""
        return f"fold into {fold.producer} ({fold.kind}{shared}): proved, output moves {fold.evidence:.1e}"
    tried = [r for r in probe.rejected if r.names == group.names]
    if tried:
        closest = min(tried, key=lambda r: r.evidence)
        return f"no fold: {len(tried)} tried, the closest ({closest.producer}) moves the output {closest.evidence:.1e}"
    return "no fold: no producer of that width"


def _ranges(indices: tuple[int, ...]) -> str:
    """0-4, 6-10, 12 for consecutive runs."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
