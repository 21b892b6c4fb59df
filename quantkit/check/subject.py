"""The model that engines are asked about, from config.json and headers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.check import ALWAYS_KEPT, Judgement, judge, recommended_first
from quantkit.checkpoint.hub import resolve_model
from quantkit.checkpoint.linears import find_blocks, linear_shapes, natural
from quantkit.engines import ENGINES
from quantkit.engines.base import ACT_ORDER, GPTQ_V2, NO_ZERO_POINTS
from quantkit.engines.units import Shape
from quantkit.errors import UsageError
from quantkit.events import Emit, ignore
from quantkit.formats import FORMATS
from quantkit.formats.kv_cache import cache_scale_owner
from quantkit.patterns import assign
from quantkit.recipe import Recipe
from quantkit.scheme import Scheme
from quantkit.weights import WeightSource

_SCHEME_FIELDS = ("bits", "group_size", "symmetric", "ignore", "override")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the schemes of its linears: those a checkpoint has, or those it would get.

    Attributes:
        shapes: {linear: (out_features, in_features)} of every weight matrix inside the blocks.
        schemes: {linear: Scheme, or None where it is in 16 bit}, for the same names.
        stored: the format it is packed in; None for a plain checkpoint.
        quirks: what is unusual about how it is packed; see `quantkit.engines.base.Model`.
        fp8_cache: scales of an FP8 cache come with it.
    """

    source: WeightSource
    shapes: Mapping[str, Shape]
    schemes: Mapping[str, Scheme | None]
    stored: str | None
    quirks: frozenset[str]
    fp8_cache: bool

    @classmethod
    def open(cls, model: str, recipe: Recipe, emit: Emit = ignore) -> Subject:
        """Open a checkpoint directory or hub name, and give its linears the recipe's schemes where it is not packed.

        Raises:
            CheckpointError: it cannot be read.
            UsageError: a pattern matches nothing, or the recipe says how to pack what is packed already.
        """
        source = WeightSource.open(resolve_model(model, emit=emit))
        prefix, _ = find_blocks(source.checkpoint)
        plain = linear_shapes(source.checkpoint, prefix)
        if source.format is None:
            schemes = assign(list(plain), recipe.scheme, recipe.ignore, recipe.overrides, ALWAYS_KEPT)
            kept = {name: schemes[name] for name in plain}
            return cls(source, plain, kept, None, frozenset(), recipe.kv_cache is not None)
        if given := [
            name for name in (*_SCHEME_FIELDS, "kv_cache") if getattr(recipe, name) != getattr(Recipe(), name)
        ]:
            raise UsageError(
                f"`{model}` is quantized already, and `--{given[0].replace('_', '-')}` would change how",
                "leave it out, or name the 16-bit checkpoint",
            )
        packed = {name: source.shape(name) for name in source.schemes}
        unpacked = {name: shape for name, shape in plain.items() if name not in packed}
        shapes = {name: (packed | unpacked)[name] for name in sorted(packed | unpacked, key=natural)}
        fp8_cache = any(cache_scale_owner(name) for name in source.checkpoint.tensors)
        return cls(
            source,
            shapes,
            {name: source.schemes.get(name) for name in shapes},
            source.format.name,
            _quirks(source),
            fp8_cache,
        )

    def judge(self, format: str, target: str, tp: int = 1) -> Judgement:
        """Ask an engine about one format: as it is stored, or as it would be written."""
        as_is = format == self.stored
        return judge(
            self.shapes,
            self.schemes,
            format,
            target,
            tp=tp,
            config=self.source.checkpoint.config,
            fp8_cache=self.fp8_cache,
            stored=as_is,
            quirks=self.quirks if as_is else frozenset(),
        )

    def judge_all(self, formats: Sequence[str], target: str, tp: int = 1) -> list[Judgement]:
        """Ask an engine about several formats, the best first.

        Args:
            formats: empty for the one it is stored in, or for all that the engine takes.
        """
        asked = formats or ((self.stored,) if self.stored else [name for name in ENGINES[target].formats])
        return recommended_first(self.judge(name, target, tp) for name in asked if name in FORMATS)


def _quirks(source: WeightSource) -> frozenset[str]:
    config, name = source.config, source.format.name if source.format else ""
    found = {
        ACT_ORDER: name == "gptq" and bool(config.get("desc_act")),
        GPTQ_V2: name == "gptq" and source.format != FORMATS["gptq"],
        NO_ZERO_POINTS: name == "awq" and config.get("zero_point", True) is False,
    }
    return frozenset(quirk for quirk, there in found.items() if there)
