"""What an FP8 KV cache costs: the scales that an engine would take for a directory, and the loss beside 16 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quantkit.checkpoint.locate import read_json_object
from quantkit.errors import CheckpointError
from quantkit.formats.kv_cache import CacheScales
from quantkit.weights import DAMAGED, WeightSource

_T = TypeVar("_T")
SIDECAR = "kv_cache_scales.tp1.json"
_SAID = {
    "artifact": "the artifact's scales",
    "sidecar": f"the scales of {SIDECAR}",
    "1.0": "scale 1.0, as engines take it where an artifact has none",
}


@dataclass(frozen=True, slots=True)
class CacheCost:
    """A loss with an FP8 KV cache beside that with a 16-bit one, over the same tokens.

    Attributes:
        dtype: of the cache.
        scales: where they are from: artifact, sidecar, or "1.0".
        nll_16bit: mean loss per token with K and V as they are, nats.
        difference: what the cache adds to the mean loss, nats.
        stderr: standard error of `difference`, window by window.
    """

    dtype: str
    scales: str
    nll_16bit: float
    difference: float
    stderr: float

    @property
    def ratio(self) -> float:
        """Perplexity with the FP8 cache over that with the 16-bit one."""
        return exp(self.difference)

    def to_json(self) -> dict[str, Any]:
        """The result as plain values, with the perplexity and the ratio that follow from them."""
        return {
            "dtype": self.dtype,
            "scales": self.scales,
            "nll_16bit": self.nll_16bit,
            "perplexity_16bit": exp(self.nll_16bit),
            "ratio": self.ratio,
            "difference": self.difference,
            "stderr": self.stderr,
        }

    def summary(self) -> str:
        """The result in a line."""
        error = "" if math.isnan(self.stderr) else f" ± {self.stderr:.4f}"
        return (
            f"FP8 KV cache, {_SAID[self.scales]}: {self.ratio:.4f} times the perplexity of a 16-bit cache,"
            f" {exp(self.nll_16bit):.3f}; nll {self.difference:+.4f}{error}"
        )


def exp(nll: float) -> float:
    """e to the power of a loss; inf where that is beyond any float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def serving_scales(source: WeightSource, attentions: Mapping[str, int]) -> tuple[str, dict[str, CacheScales]]:
    """Choose the scales of every attention module: the artifact's, else those of SGLang's file beside it, else 1.

    Args:
        attentions: {attention module: block}.

    Returns:
        Where they are from, as `CacheCost.scales` has it, and the scales.

    Raises:
        CheckpointError: some modules have scales and others do not.
    """
    if stored := source.cache_scales():
        return "artifact", {name: _required(stored.get(name), name) for name in attentions}
    path = source.checkpoint.path / SIDECAR
    if path.is_file():
        factors = sidecar_factors(read_json_object(path))
        found = {name: _required(factors.get(str(block)), name) for name, block in attentions.items()}
        return "sidecar", {name: CacheScales(factor, factor) for name, factor in found.items()}
    return "1.0", dict.fromkeys(attentions, CacheScales(1.0, 1.0))


def sidecar_factors(content: Mapping[str, Any]) -> dict[str, float]:
    """{layer number: factor for K and V} of the first rank, from the content of a file as SGLang takes it.

    Raises:
        CheckpointError: it has another structure, or a factor is no positive finite number.
    """
    try:
        factors = {str(layer): float(factor) for layer, factor in content["kv_cache"]["scaling_factor"]["0"].items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"`{SIDECAR}` has no factors of the layers under `scaling_factor`", DAMAGED) from error
    if bad := next((layer for layer, factor in factors.items() if not 0 < factor < math.inf), None):
        raise CheckpointError(f"`{SIDECAR}` has {factors[bad]} for layer {bad}, which is no scale", DAMAGED)
    return factors


def _required(scale: _T | None, name: str) -> _T:
    if scale is None:
        raise CheckpointError(f"`{name}` has no scales for its KV cache, and other layers have", DAMAGED)
    return scale
