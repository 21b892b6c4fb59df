"""What a run will do with every tensor, from config.json and safetensors headers: no weight is read, no model built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.assignment import choose_schemes
from quantkit.checkpoint.hub import resolve_model
from quantkit.checkpoint.layout import TensorSpec
from quantkit.checkpoint.linears import find_blocks, linear_shapes, natural
from quantkit.checkpoint.reader import Checkpoint, require_quantizable
from quantkit.errors import CheckpointError, UsageError
from quantkit.events import Emit, Fallback, ignore
from quantkit.formats import FORMATS, Format
from quantkit.formats.base import stored_dtype
from quantkit.recipe import Recipe
from quantkit.scheme import Scheme
from quantkit.units import gigabytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Every tensor's fate.

    Attributes:
        recipe: what was asked.
        source: the checkpoint.
        blocks: decoder blocks.
        shapes: {linear: (out_features, in_features)} of every weight matrix inside the blocks, by checkpoint name.
        schemes: {linear: Scheme, or None where it stays as it is}, for the same names.
        fallbacks: where the plan differs from what was asked, with the reason.
        memory: predicted peak of resident memory by part, bytes.
        attentions: {attention module, by checkpoint name: block} whose cache gets scales.
        out: where the artifact will go, if that is known.
        model: name of the source: of its folder, or on the hub.
    """

    recipe: Recipe
    source: Checkpoint
    blocks: int
    shapes: dict[str, tuple[int, int]]
    schemes: dict[str, Scheme | None]
    fallbacks: tuple[Fallback, ...]
    memory: dict[str, int]
    attentions: dict[str, int] = field(default_factory=dict)
    out: Path | None = None
    model: str = ""

    @property
    def packed(self) -> dict[str, Scheme]:
        """{linear: scheme} of the linears that will be packed."""
        return {name: scheme for name, scheme in self.schemes.items() if scheme is not None}

    @property
    def scale_dtype(self) -> str:
        """Safetensors dtype of every scale: that of the weights when all have the same one of 16 bits, else BF16."""
        stored = {self.source.tensors[f"{name}.weight"].dtype for name in self.packed}
        return "F16" if stored == {"F16"} else "BF16"

    @property
    def formats(self) -> tuple[Format, ...]:
        """One for each artifact."""
        return tuple(FORMATS[name] for name in self.recipe.format)

    def specs(self, fmt: Format) -> tuple[TensorSpec, ...]:
        """Every tensor of an artifact, in the order of the source's names; the scales of the cache come last."""
        packed, scale_dtype = self.packed, stored_dtype(fmt, self.scale_dtype)
        specs: list[TensorSpec] = []
        for name in sorted(self.source.tensors, key=natural):
            info, linear = self.source.tensors[name], name.removesuffix(".weight")
            if linear in packed and name != linear:
                parts = fmt.specs(linear, packed[linear], self.shapes[linear], scale_dtype)
                specs += [TensorSpec(part, dtype, shape) for part, (dtype, shape) in parts.items()]
            else:
                specs.append(TensorSpec(name, info.dtype, info.shape))
        scales = [fmt.cache_specs(attention).items() for attention in self.attentions]
        return (*specs, *(TensorSpec(name, dtype, shape) for each in scales for name, (dtype, shape) in each))

    def output_bytes(self, fmt: Format) -> int:
        """Bytes of all tensors of an artifact."""
        return sum(spec.nbytes for spec in self.specs(fmt))

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of resident memory, bytes."""
        return sum(self.memory.values())

    def keeping(self, names: Mapping[str, str]) -> Plan:
        """This plan with the linears {name: reason} kept as they are.

        Raises:
            CheckpointError: those are all that would have been quantized.
        """
        if names and names.keys() >= self.packed.keys():
            some = ", ".join(f"`{name}`" for name in list(names)[:3])
            raise CheckpointError(
                f"none of the {len(names)} matrices that would be quantized, such as {some}, is a plain linear of the"
                " model",
                "it is built of other modules than torch's linears, or config.json belongs to another part of it",
            )
        if not names:
            return self
        fallbacks = tuple(Fallback(name, reason) for name, reason in names.items())
        return replace(self, schemes=self.schemes | dict.fromkeys(names), fallbacks=self.fallbacks + fallbacks)

    def caching(self, attentions: Mapping[str, int]) -> Plan:
        """This plan with scales for the cache of the attention modules {checkpoint name: block}."""
        return replace(self, attentions=dict(attentions))

    def summary(self) -> list[str]:
        """The plan in a few lines."""
        packed = self.packed
        by_scheme: dict[Scheme, int] = {}
        for scheme in packed.values():
            by_scheme[scheme] = by_scheme.get(scheme, 0) + 1
        what = [f"{count} linears → {scheme}" for scheme, count in by_scheme.items()]
        what += [f"{self.recipe.kv_cache} KV cache"] if self.recipe.kv_cache else []
        rest = len(self.source.tensors) - len(packed)
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in self.memory.items())
        sizes = " + ".join(gigabytes(self.output_bytes(fmt)) for fmt in self.formats)
        free = shutil.disk_usage(_existing(self.out or Path())).free
        lines = [
            f"Plan  {self.blocks} blocks · {' · '.join(what)} · {self.recipe.method} · {', '.join(self.recipe.format)}",
            f"      kept as they are: {rest} tensors{_kept_names(self)}",
            f"      size {gigabytes(self.source.nbytes)} → {sizes} · disk {gigabytes(free)} free"
            f" · memory about {gigabytes(self.peak_bytes)} ({parts})",
        ]
        return lines + [f"      {fallback.name}: {fallback.reason}" for fallback in self.fallbacks[:5]]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "source": str(self.source.path),
            "method": self.recipe.method,
            "formats": list(self.recipe.format),
            "kv_cache": self.recipe.kv_cache,
            "target": self.recipe.target,
            "tp": self.recipe.tp,
            "blocks": self.blocks,
            "linears": {name: str(scheme) if scheme else None for name, scheme in self.schemes.items()},
            "tensors": len(self.source.tensors),
            "packed": len(self.packed),
            "source_bytes": self.source.nbytes,
            "output_bytes": sum(self.output_bytes(fmt) for fmt in self.formats),
            "peak_bytes": self.peak_bytes,
            "memory": self.memory,
            "fallbacks": [{"name": f.name, "reason": f.reason} for f in self.fallbacks],
        }


def make_plan(recipe: Recipe, model: str, out: Path | None = None, emit: Emit = ignore) -> Plan:
    """Plan a run.

    Args:
        model: a checkpoint directory, or a name on the Hugging Face hub.
        out: where the artifact will go; checked for being the source, and for free disk space in the summary.

    Raises:
        CheckpointError: the source cannot be read or quantized.
        UnsupportedScheme: a shape allows no such scheme, and the recipe does not say what to do then.
        UsageError: a pattern matches nothing, or nothing is left to quantize.
    """
    recipe = recipe.validate()
    source = Checkpoint.open(resolve_model(model, emit=emit))
    require_quantizable(source)
    if out is not None and os.path.exists(out) and out.resolve() == source.path.resolve():
        raise UsageError(f"`{out}` is the source", "choose another output folder")
    prefix, count = find_blocks(source)
    shapes = linear_shapes(source, prefix)
    schemes, fallbacks = choose_schemes(recipe, source, shapes)
    for fallback in fallbacks:
        emit(fallback)
    memory = _memory(recipe, source, prefix, shapes)
    name = Path(model).resolve().name if Path(model).exists() else model
    return Plan(recipe, source, count, shapes, schemes, fallbacks, memory, out=out, model=name)


def _memory(recipe: Recipe, source: Checkpoint, prefix: str, shapes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Peak resident memory by part, bytes: what one block needs at once."""
    first = [info for name, info in source.tensors.items() if name.startswith(f"{prefix}0.")]
    linears = {name: shape for name, shape in shapes.items() if name.startswith(f"{prefix}0.")} or dict(shapes)
    outer = [info.nbytes for name, info in source.tensors.items() if not name.startswith(prefix)]
    widths = [columns for _, columns in linears.values()]
    hidden, widest = min(widths, default=0), max(widths, default=0)
    # Gram matrices: q/k/v, o and gate/up read the hidden width, down the widest; one more is being factored or rescaled
    rounds = recipe.method != "none"
    grams = rounds * 4 * (3 * hidden**2 + (1 + (recipe.method != "rtn")) * widest**2)
    # the weight itself, its permutation, its errors, and its grid
    largest = rounds * 4 * 4 * max((n * k for n, k in linears.values()), default=0)
    return {
        "runtime": 600_000_000,  # the interpreter with torch and transformers, and what the allocator keeps
        "block": max(sum(info.nbytes for info in first) + grams + largest, sum(outer)),
        "hidden states": 2 * recipe.samples * recipe.seq_len * hidden,
    }


def _existing(path: Path) -> Path:
    """The closest ancestor that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))


def _kept_names(plan: Plan) -> str:
    kept = [name for name, scheme in plan.schemes.items() if scheme is None]
    return f", {len(kept)} linears among them ({', '.join(kept[:3])}{', …' if len(kept) > 3 else ''})" if kept else ""
