"""What a run did: the account that is written beside the weights as quantkit.json."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from quantkit.artifact import Artifact
from quantkit.device import peak_rss
from quantkit.events import Event, Fallback, Note
from quantkit.formats.kv_cache import CacheScales
from quantkit.group import LinearGroup
from quantkit.ops.affine import dequantize
from quantkit.ops.linalg import output_error
from quantkit.ops.stats import InputStats
from quantkit.plan import Plan
from quantkit.qweight import QuantizedWeight
from quantkit.units import gigabytes
from quantkit.verify import Verdict

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
        cache: {attention module: (block, scales of its FP8 cache)}.
        outputs: {format: bytes, digests of the files, and scales that it could not store as they were}.
        verdict: of the last look at the written files.
    """

    plan: Plan
    device: str = ""
    dtype: str = ""
    linears: dict[str, dict[str, Any]] = field(default_factory=dict)
    folds: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    calibration: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, tuple[int, CacheScales]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    verdict: Verdict | None = None
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

    def add_cache(self, block: int, scales: Mapping[str, CacheScales]) -> None:
        """Record the scales of a block's FP8 cache, {attention module: scales}."""
        self.cache |= {name: (block, each) for name, each in scales.items()}

    def cache_by_layer(self) -> dict[int, CacheScales]:
        """{block: scales of its cache}; where a block has several attentions, the largest."""
        layers: dict[int, CacheScales] = {}
        for block, each in self.cache.values():
            before = layers.get(block, each)
            layers[block] = CacheScales(max(before.k, each.k), max(before.v, each.v))
        return layers

    def state(self) -> dict[str, Any]:
        """What must be known to go on later, as JSON values."""
        return {
            "linears": self.linears,
            "folds": self.folds,
            "rewritten": self.rewritten,
            "fallbacks": [asdict(each) for each in self.fallbacks],
            "cache": {name: [block, each.k, each.v] for name, (block, each) in self.cache.items()},
            "seconds": time.monotonic() - self.started,
            "peak_rss": max(self.peak_rss, peak_rss()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` of an earlier process; its time counts, too."""
        self.linears, self.folds, self.rewritten = state["linears"], state["folds"], state["rewritten"]
        self.fallbacks[:] = [Fallback(**each) for each in state["fallbacks"]]
        self.cache = {name: (block, CacheScales(k, v)) for name, (block, k, v) in state["cache"].items()}
        self.started -= state["seconds"]
        self.peak_rss = state["peak_rss"]

    def finish(self, artifact: Artifact) -> None:
        """Take the account of a written artifact, and the final readings of clock and memory."""
        moved = {} if not artifact.moved.moved else {"scales_moved": artifact.moved.to_json()}
        size, digests = artifact.writer.total_bytes, artifact.writer.digests()
        self.outputs[artifact.format.name] = {"bytes": size, "sha256": digests, **moved}
        self.seconds = time.monotonic() - self.started
        self.peak_rss = max(self.peak_rss, peak_rss())

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

    def to_json(self, only: str | None = None) -> dict[str, Any]:
        """The record as JSON values: of the whole run, or as the artifact of one format has it.

        A run of one format is told as its artifact is.
        """
        plan = self.plan
        only = next(iter(self.outputs)) if only is None and len(self.outputs) == 1 else only
        cache = {name: {"block": block, "k": each.k, "v": each.v} for name, (block, each) in self.cache.items()}
        outputs = {"outputs": self.outputs} if only is None else {"format": only, "output": self.outputs[only]}
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
            "kv_cache": cache,
            **outputs,
            "seconds": round(self.seconds, 2),
            "peak_rss": self.peak_rss,
            "predicted_peak": plan.peak_bytes,
        }

    def to_text(self, fmt: str) -> str:
        """The record as it is written beside the weights of a format."""
        return json.dumps(self.to_json(fmt), indent=1, ensure_ascii=False) + "\n"

    def summary(self) -> list[str]:
        """The run in a few lines."""
        spent = f"in {self.seconds:.0f} s, peak memory {gigabytes(self.peak_rss)}"
        lines = [] if self.linears else [f"no linear quantized, {spent}"]
        if errors := sorted(((entry["error"], name) for name, entry in self.linears.items()), reverse=True):
            before = self.plan.source.nbytes
            sizes = [f"{gigabytes(size)} ({before / size:.1f}x smaller)" for size in self._sizes()]
            lines += [
                f"quantized {len(errors)} linears with {self.plan.recipe.method}:"
                f" {gigabytes(before)} → {' + '.join(sizes)} {spent}",
                f"output error: median {errors[len(errors) // 2][0]:.2%}, worst {errors[0][0]:.2%} in {errors[0][1]}",
            ]
        if self.cache:
            largest = max((max(each.k, each.v), name) for name, (_, each) in self.cache.items())
            lines.append(
                f"FP8 KV cache: scales of {len(self.cache)} layers, the largest {largest[0]:.3g} in {largest[1]}"
            )
        for fallback in self.fallbacks[:5]:
            lines.append(f"fallback: {fallback.name}: {fallback.reason}")
        if len(self.fallbacks) > 5:
            lines.append(f"and {len(self.fallbacks) - 5} more fallbacks, listed in quantkit.json")
        if self.verdict is not None:
            lines.append(self.verdict.line())
        return lines

    def _sizes(self) -> list[int]:
        return [output["bytes"] for output in self.outputs.values()]


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
