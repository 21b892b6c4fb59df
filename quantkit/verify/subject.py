"""What is looked at: an artifact, the model it should be, the source, and what may differ from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.errors import CheckpointError
from quantkit.scheme import Scheme
from quantkit.weights import WeightSource

RECORD_FILE = "quantkit.json"


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact that could be opened.

    Attributes:
        source: the artifact.
        skeleton: the model of its config.json.
        shapes: {tensor by the plain model's name: shape} of everything the model asks for.
        reference: the source it is compared with, or None.
        rewritten: tensors that a fold of the record may have changed.
        rescaled: linears whose rows or columns a fold of the record may have changed.
    """

    source: WeightSource
    skeleton: Skeleton
    shapes: dict[str, tuple[int, ...]]
    reference: WeightSource | None
    rewritten: frozenset[str]
    rescaled: frozenset[str]

    @classmethod
    def open(
        cls, source: WeightSource, reference: WeightSource | None, record: Mapping[str, Any], *, trust_remote_code: bool
    ) -> Subject:
        """Build the model of an artifact.

        Raises:
            CheckpointError: transformers does not know the model, or the artifact lacks a tensor of it.
        """
        # names only: shapes are compared one by one, so that each wrong one is told
        skeleton = build_skeleton(
            source.checkpoint.path, dict.fromkeys(source.tensors), trust_remote_code=trust_remote_code
        )
        tensors = skeleton.tensors()
        parameters = dict(skeleton.model.named_parameters()) | dict(skeleton.model.named_buffers())
        shapes = {tensor: tuple(parameters[name].shape) for name, tensor in tensors.items()}
        producers, linears = _folded(record)
        rewritten = {tensors.get(f"{name}.{leaf}", "") for name in producers for leaf in ("weight", "bias")}
        rescaled = {tensors.get(f"{name}.weight", "").removesuffix(".weight") for name in producers | linears}
        return cls(source, skeleton, shapes, reference, frozenset(rewritten - {""}), frozenset(rescaled - {""}))

    def parts(self, linear: str) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
        """Tensors {name: (dtype, shape)} of a packed linear as its format lays them out, and those stored beside them.

        The dtype of scales is left to the file: of those the format knows, the one that fits what is stored best.
        """
        fmt, stored = self.source.format, self.source.checkpoint.tensors
        assert fmt is not None
        rows, columns = self.shapes[f"{linear}.weight"]
        layouts = [fmt.specs(linear, self.source.schemes[linear], (rows, columns), each) for each in fmt.scale_dtypes]

        def fitting(layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
            return sum(name in stored and stored[name].dtype == dtype for name, (dtype, _) in layout.items())

        layout = max(layouts, key=fitting)
        owned = {f"{linear}.{suffix}" for suffix in fmt.suffixes} & stored.keys()
        return layout, owned - layout.keys()

    def linears(self) -> dict[str, Scheme | None]:
        """{linear: scheme} of every plain linear of the model; None where it is not packed."""
        return {name: self.source.schemes.get(name) for name in self.skeleton.linears()}


def is_scheme_sized(shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether a weight of that shape can be packed with the scheme at all."""
    return len(shape) == 2 and scheme.fits(shape[1])


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, over that of what was wanted; 0 where both are zero."""
    difference, norm = float((found - wanted).norm()), float(wanted.norm())
    return difference / norm if norm else difference


def _folded(record: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Module paths in the model of the producers and of the consumers of every applied fold."""
    folds = record.get("folds")
    producers: set[str] = set()
    linears: set[str] = set()
    for fold in folds if isinstance(folds, list) else ():
        if not isinstance(fold, dict) or fold.get("applied") is not True:
            continue
        consumers = fold.get("linears")
        if not isinstance(consumers, list):
            raise CheckpointError(f"`{RECORD_FILE}` has a fold without linears", "write the artifact again")
        producers.add(f"{fold.get('block')}.{fold.get('producer')}")
        linears |= {f"{fold.get('block')}.{name}" for name in consumers}
    return producers, linears
