"""What a checkpoint format is: a stateless translation between a quantized weight and named tensors.

A format sees one linear at a time. It opens no file, knows no model and keeps nothing between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

TensorSpec = tuple[str, tuple[int, ...]]
"""A safetensors dtype string such as "I32" or "BF16", and a shape."""


def stored_dtype(fmt: Format, dtype: str) -> str:
    """Safetensors dtype in which a format stores scales that were rounded to `dtype`."""
    return dtype if dtype in fmt.scale_dtypes else fmt.scale_dtypes[0]


class Format(Protocol):
    """One on-disk layout. N out_features, K in_features, G groups."""

    @property
    def name(self) -> str:
        """The name users type, and the `quant_method` that engines read."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Tensor names it owns, after the module's name and a dot; the first holds the codes."""

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Safetensors dtypes that its scales may have."""

    def check(self, scheme: Scheme, shape: tuple[int, int], *, least_zero: int = 0) -> None:
        """Accept a weight [N, K] under a scheme, from shapes alone.

        Args:
            least_zero: no zero point will be smaller; 0 where they are not known yet.

        Raises:
            UnsupportedScheme: engines that read this format could not load the result.
        """

    def specs(self, name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: str) -> dict[str, TensorSpec]:
        """List exactly the tensors that `pack` will return for the linear `name`.

        Args:
            scale_dtype: safetensors dtype of the scales, one of `scale_dtypes`.
        """

    def pack(self, name: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """Lay a quantized weight out as named tensors, keyed by full tensor name.

        Raises:
            UnsupportedScheme: this layout cannot say what the weight holds.
            ValueError: the scale has a dtype that is none of `scale_dtypes`.
        """

    def unpack(
        self, name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int] | None = None
    ) -> QuantizedWeight:
        """Undo `pack`. `tensors` may hold others besides.

        Args:
            shape: [N, K] where the caller knows it; a file that disagrees is refused.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype or shape than the scheme gives it.
        """

    def config(self, schemes: Mapping[str, Scheme | None], *, fp8_cache: bool = False) -> dict[str, Any]:
        """Write the `quantization_config` of a model.

        Args:
            schemes: every linear of the model by full checkpoint name; None means kept in 16 bit.
            fp8_cache: the checkpoint holds scales of an FP8 KV cache.

        Raises:
            UnsupportedScheme: it cannot describe these schemes beside each other.
        """

    def files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Write further JSON files that readers of this format expect, {name: content}.

        Args:
            config: what `config` returned.
        """

    def cache_specs(self, attention: str) -> dict[str, TensorSpec]:
        """List the scales of an FP8 cache, of K and then of V; nothing where the format has no place for them.

        Args:
            attention: full name of an attention module.
        """

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """Read a `quantization_config`, also another tool's, as a function from a linear's name to its scheme.

        Raises:
            CheckpointError: it describes something that `unpack` cannot read.
        """
