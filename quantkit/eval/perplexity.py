"""Perplexity of a checkpoint or an artifact, streamed block by block from the written files.

W windows, T tokens of a window, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from quantkit.blocks.kvcache import CacheSimulator, CacheTap, find_attentions
from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.blocks.stream import Stream
from quantkit.checkpoint.hub import resolve_model
from quantkit.data.corpus import load_corpus
from quantkit.device import choose_device, choose_dtype, current_rss
from quantkit.errors import NumericalError
from quantkit.eval.kv_cache import CacheCost, exp, serving_scales
from quantkit.eval.windows import Windows, ratio_estimate, read_windows
from quantkit.events import BlockDone, Emit, Stage, ignore
from quantkit.recipe import KV_CACHES, check_choice
from quantkit.weights import WeightSource

# logits held at once: float32 elements
_LOGITS = 1 << 25


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A measured perplexity with everything that defines it.

    Attributes:
        nll: mean negative log-likelihood per scored token, nats; each token weighs the same.
        stderr: standard error of `nll`, taking windows as the independent units.
        tokens: tokens that were scored.
        window: tokens the model sees at once, special tokens included.
        stride: tokens from one window to the next; with stride < window only tokens not scored before are scored.
        prefix: token ids that start every window, as the tokenizer adds them when serving.
        digest: sha256 of the corpus.
        bytes: UTF-8 bytes of the text behind the scored tokens; None where it is not known.
        words: words that begin in that text; None where it is not known.
        kv_cache: what the FP8 KV cache costs, with which everything above was measured; None with 16 bits.
    """

    path: str
    data: str
    nll: float
    stderr: float
    tokens: int
    windows: int
    window: int
    stride: int
    prefix: tuple[int, ...]
    dtype: str
    device: str
    digest: str
    seconds: float
    bytes: int | None = None
    words: int | None = None
    kv_cache: CacheCost | None = None

    @property
    def perplexity(self) -> float:
        """exp(nll); inf where that is beyond any float."""
        return exp(self.nll)

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text, which models with different tokenizers share; None without bytes."""
        return self.nll * self.tokens / math.log(2) / self.bytes if self.bytes else None

    @property
    def word_perplexity(self) -> float | None:
        """e to the power of the loss per word; None without words, inf where that is beyond any float."""
        return exp(self.nll * self.tokens / self.words) if self.words else None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values, which know neither nan (the error of one window) nor inf: both become null."""
        values = asdict(self) | {
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "word_perplexity": self.word_perplexity,
            "prefix": list(self.prefix),
        }
        return _finite(values) | {"kv_cache": _finite(self.kv_cache.to_json()) if self.kv_cache else None}

    def summary(self) -> list[str]:
        """The result in a few lines."""
        start = f"each starts with {list(self.prefix)}" if self.prefix else "no special token is added"
        known = not math.isnan(self.stderr)  # one window says nothing about the spread
        errors = (f" ± {self.perplexity * self.stderr:.3f}", f" ± {self.stderr:.4f}") if known else ("", "")
        lines = [
            f"perplexity {self.perplexity:.3f}{errors[0]}  ({self.path})",
            f"nll {self.nll:.4f}{errors[1]} nats over {self.tokens:,} tokens of {self.data}",
            f"{self.windows} windows of {self.window}, stride {self.stride}; {start}; {self.dtype} on {self.device}",
        ]
        if self.bits_per_byte is not None:
            words = "" if self.word_perplexity is None else f", word perplexity {self.word_perplexity:,.1f}"
            counted = "" if self.word_perplexity is None else f" and {self.words:,} words"
            lines.append(f"{self.bits_per_byte:.4f} bits per byte{words}: over {self.bytes:,} bytes{counted}")
        return lines + ([self.kv_cache.summary()] if self.kv_cache else [])


@torch.no_grad()
def perplexity(
    path: str | Path,
    *,
    data: str = "builtin-heldout",
    split: str | None = None,
    column: str | None = None,
    window: int = 512,
    stride: int | None = None,
    max_tokens: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    kv_cache: str | None = None,
    trust_remote_code: bool = False,
    emit: Emit = ignore,
) -> Perplexity:
    """Measure perplexity by reading the files of a checkpoint or artifact, one decoder block in memory at a time.

    Args:
        data: a calibration source; text is joined and tokenized without special tokens.
        window: tokens per window, the tokenizer's prefix (BOS) included.
        stride: tokens from one window to the next; None means windows that do not overlap.
        max_tokens: stop after that many tokens of the data.
        dtype: of the forward passes; the loss is taken in float32.
        kv_cache: "fp8" lets attention see K and V as an FP8 cache gives them back, and measures a 16-bit cache beside
            it in the same pass.

    Raises:
        CheckpointError: the directory cannot be read.
        UnsupportedScheme: the model keeps no K and V that FP8 could hold.
        UsageError: the data cannot be used.
    """
    if kv_cache is not None:
        check_choice("kv_cache", kv_cache, KV_CACHES)
    started = time.monotonic()
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    source = WeightSource.open(resolve_model(str(path), emit=emit))
    directory = source.checkpoint.path
    skeleton = build_skeleton(directory, source.tensors, device=where, trust_remote_code=trust_remote_code)
    text = read_windows(
        load_corpus(data, split=split, column=column),
        directory,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        trust_remote_code=trust_remote_code,
    )

    origin, scales = serving_scales(source, find_attentions(skeleton)) if kv_cache else ("", {})
    taps = [None, CacheSimulator(scales)] if kv_cache else [None]
    losses = _losses(source, skeleton, text, taps, kind, where, emit)
    nll, stderr = ratio_estimate(losses[-1], text.counts)
    return Perplexity(
        path=str(path),
        data=data,
        nll=nll,
        stderr=stderr,
        tokens=text.tokens,
        windows=len(text.rows),
        window=window,
        stride=text.stride,
        prefix=text.prefix,
        dtype=str(kind).removeprefix("torch."),
        device=str(where),
        digest=text.digest,
        seconds=time.monotonic() - started,
        bytes=text.bytes,
        words=text.words,
        kv_cache=_cost(origin, losses, text.counts) if kv_cache else None,
    )


def _losses(
    source: WeightSource,
    skeleton: Skeleton,
    text: Windows,
    taps: Sequence[CacheTap | None],
    dtype: torch.dtype,
    device: torch.device,
    emit: Emit,
) -> list[Tensor]:
    """For each tap on the KV cache the summed loss of every window, float64 [W]; every weight is read once."""
    outer = {n: source.read([tensor], dtype)[tensor].to(device) for n, tensor in skeleton.outer.items()}
    streams = [Stream.embed(skeleton, outer, text.rows) for _ in taps]
    for block in skeleton.blocks:
        begun = time.monotonic()
        emit(Stage(block.index, len(skeleton.blocks), "forward"))
        weights = {n: w.to(device) for n, w in source.read_for(block.module, block.tensors, dtype).items()}
        for stream, tap in zip(streams, taps, strict=True):
            stream.advance(block, weights, tap)
        emit(BlockDone(block.index, len(skeleton.blocks), {}, time.monotonic() - begun, current_rss()))
    losses = [torch.zeros(len(text.rows), dtype=torch.float64) for _ in taps]
    for found, stream in zip(losses, streams, strict=True):
        for i, hidden in stream.ordered():
            found[i] = _window_loss(skeleton, outer, hidden, text.rows[i].to(device), text.scored[i])
        if not bool(torch.isfinite(found).all()):
            raise NumericalError("the logits are not finite", "look at the weights of the final norm and the head")
    return losses


def _cost(origin: str, losses: Sequence[Tensor], counts: Tensor) -> CacheCost:
    """Compare the losses of the same windows [W] with a 16-bit cache and an FP8 one."""
    plain, fp8 = losses
    difference, stderr = ratio_estimate(fp8 - plain, counts)
    return CacheCost("fp8_e4m3", origin, ratio_estimate(plain, counts)[0], difference, stderr)


def _window_loss(skeleton: Skeleton, outer: dict[str, Tensor], hidden: Tensor, ids: Tensor, scored: int) -> float:
    """Summed loss, nats, of the last `scored` tokens of one window; hidden [T, D], ids [T]."""
    start, stop = len(ids) - scored - 1, len(ids) - 1  # the states that predict them
    vocabulary = skeleton.vocabulary
    step = max(1, _LOGITS // vocabulary)
    total = 0.0
    for k in range(start, stop, step):
        end = min(k + step, stop)
        logits = skeleton.logits(outer, hidden[None, k:end])[0].float()
        total += float(cross_entropy(logits, ids[k + 1 : end + 1], reduction="none").double().sum())
    return total


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
