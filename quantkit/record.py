"""What a run did: the account that is written beside the weights as quantkit.json."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from quantkit.device import peak_rss
from quantkit.events import Event, Fallback, Note
from quantkit.group import LinearGroup
from quantkit.ops.affine import dequantize
from quantkit.ops.linalg import output_error
from quantkit.ops.stats import InputStats
from quantkit.plan import Plan
from quantkit.qweight import QuantizedWeight
from quantkit.units import gigabytes

FORMAT_VERSION = 1
# output rows that a linear's error is taken over, evenly spaced: all of them would cost as much as the rounding itself
ERROR_ROWS = 2048
_PACKAGES = ("quantkit", "torch", "transformers", "safetensors", "numpy")


@dataclass(slots=True)
class RunRecord:
    """The account of one run; `emit` collects what the pipeline reports.

    Attributes:
        plan: what was to be done.
        linears: {linear: {scheme, error, tokens, damp}}; error is tr(E H Eᵀ) / tr(W H Wᵀ) over the calibration tokens
            and at most ERROR_ROWS output rows.
        rewritten: tensors that a fold changed and that are not packed (norms, biases).
        folds: one entry per group that could be rescaled: block, producer, linears, applied, evidence.
        fallbacks: what was done in another way than asked.
        calibration: the account of the calibration rows.
    """

    plan: Plan
    device: str = ""
    dtype: str = ""
    linears: dict[str, dict[str, Any]] = field(default_factory=dict)
    folds: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    calibration: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    rewritten: int = 0
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    peak_rss: int = 0

    def collecting(self, emit: Callable[[Event], None]) -> Callable[[Event], None]:
        """An `emit` that passes everything on, a repeated note only once, and keeps the fallbacks."""
        noted: set[Event] = set()

        def both(event: Event) -> None:
            if isinstance(event, Fallback):
                self.fallbacks.append(event)
            if isinstance(event, Note):
                if event in noted:
                    return
                noted.add(event)
            emit(event)

        return both

    def add_linear(
        self, name: str, q: QuantizedWeight, weight: Tensor, stats: InputStats | None, damp: float | None
    ) -> float:
        """Record a rounded linear, and return its relative output error over the calibration tokens."""
        every = slice(None, None, -(-len(weight) // ERROR_ROWS))
        rows, difference = weight[every], dequantize(q)[every] - weight[every]
        moments = stats.hessian if stats else torch.eye(weight.shape[1], device=weight.device)
        norm, error = float(output_error(rows, moments).sum()), float(output_error(difference, moments).sum())
        relative = error / norm if norm > 0 else 0.0
        entry = {"scheme": str(q.scheme), "error": relative, "tokens": stats.count if stats else 0}
        self.linears[name] = entry | ({"damp": damp} if damp is not None else {})
        return relative

    def add_fold(self, block: str, group: LinearGroup, *, applied: bool) -> None:
        """Record whether a proved fold was used."""
        assert group.fold is not None
        self.folds.append(
            {
                "block": block,
                "producer": group.fold.producer,
                "linears": list(group.names),
                "applied": applied,
                "evidence": group.fold.evidence,
            }
        )

    def finish(self, digests: dict[str, str]) -> None:
        """Take the digests of the written files, and the final readings of clock and memory."""
        self.digests = digests
        self.seconds = time.monotonic() - self.started
        self.peak_rss = peak_rss()

    @property
    def tensors(self) -> dict[str, int]:
        """What became of the source's tensors; packed, rewritten and copied add up to all of them."""
        total, packed = len(self.plan.source.tensors), len(self.linears)
        return {
            "source": total,
            "packed": packed,
            "rewritten": self.rewritten,
            "copied": total - packed - self.rewritten,
        }

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        plan = self.plan
        return {
            "format_version": FORMAT_VERSION,
            "versions": versions(),
            "source": {
                "name": plan.model,
                "digest": plan.source.digest(),
                "bytes": plan.source.nbytes,
            },
            "recipe": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(plan.recipe).items()},
            "device": self.device,
            "dtype": self.dtype,
            "calibration": self.calibration,
            "tensors": self.tensors,
            "linears": self.linears,
            "folds": self.folds,
            "fallbacks": [{"name": f.name, "reason": f.reason} for f in self.fallbacks],
            "output": {"bytes": plan.output_bytes, "sha256": self.digests},
            "seconds": round(self.seconds, 2),
            "peak_rss": self.peak_rss,
            "predicted_peak": plan.peak_bytes,
        }

    def to_text(self) -> str:
        """The record as it is written."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"

    def summary(self) -> list[str]:
        """The run in a few lines."""
        errors = sorted(((entry["error"], name) for name, entry in self.linears.items()), reverse=True)
        before, after = self.plan.source.nbytes, self.plan.output_bytes
        lines = [
            f"quantized {len(self.linears)} linears with {self.plan.recipe.method}:"
            f" {gigabytes(before)} → {gigabytes(after)} ({before / after:.1f}x smaller)"
            f" in {self.seconds:.0f} s, peak memory {gigabytes(self.peak_rss)}",
            f"output error: median {errors[len(errors) // 2][0]:.2%}, worst {errors[0][0]:.2%} in {errors[0][1]}",
        ]
        for fallback in self.fallbacks[:5]:
            lines.append(f"fallback: {fallback.name}: {fallback.reason}")
        if len(self.fallbacks) > 5:
            lines.append(f"and {len(self.fallbacks) - 5} more fallbacks, listed in quantkit.json")
        return lines


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
