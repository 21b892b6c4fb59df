"""KL divergence and perplexity of artifacts against a reference, over the same tokens in one pass."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.data.corpus import Corpus, load_corpus
from quantkit.device import choose_device, choose_dtype
from quantkit.errors import UsageError
from quantkit.eval.divergence import Bin, Spread, TokenScores, by_confidence, spread, window_sums
from quantkit.eval.kv_cache import exp
from quantkit.eval.together import Model, run_together
from quantkit.eval.windows import Windows, ratio_estimate, read_windows
from quantkit.events import Emit, ignore

METRICS_VERSION = 1
FLOOR_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was measured on, and how: figures are comparable only where all of this agrees.

    Attributes:
        tokens: scored tokens.
        window: tokens the model sees at once, special tokens included.
        stride: tokens from one window to the next.
        prefix: token ids that start every window.
        bytes: UTF-8 bytes of the text behind the scored tokens; None where it is not known.
        words: words that begin in that text; None where it is not known.
        dtype: of the arithmetic.
        digest: sha256 of the corpus.
    """

    data: str
    digest: str
    tokens: int
    windows: int
    window: int
    stride: int
    prefix: tuple[int, ...]
    bytes: int | None
    words: int | None
    dtype: str
    device: str

    def line(self) -> str:
        """The conditions in a line."""
        return (
            f"{self.tokens:,} tokens of {self.data}, {self.windows} windows of {self.window}, stride {self.stride};"
            f" {self.dtype} on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """The noise floor: the reference in its 16-bit dtype against itself in the dtype of the measurement.

    Attributes:
        kl: over the first windows of the text.
    """

    dtype: str
    kl: Spread


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model is from its reference.

    Attributes:
        path: the model.
        reference: what it was compared with.
        kl: KL(reference || model), over the whole vocabulary.
        bins: by the reference's confidence.
        floor: the 16-bit noise floor; None where it was not measured.
        nll_reference: mean loss of the reference, nats per token.
        nll: mean loss of the model, nats per token.
        nll_stderr: standard error of `nll`, by windows.
        difference: nll - nll_reference, over the same tokens.
        difference_stderr: standard error of `difference`, by windows; far below that of either.
        bytes_on_disk: of the model's tensors.
        reference_bytes: of the reference's tensors.
    """

    path: str
    reference: str
    conditions: Conditions
    kl: Spread
    bins: tuple[Bin, ...]
    floor: Floor | None
    nll_reference: float
    nll_reference_stderr: float
    nll: float
    nll_stderr: float
    difference: float
    difference_stderr: float
    bytes_on_disk: int
    reference_bytes: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """Perplexity of the model; inf where that is beyond any float."""
        return exp(self.nll)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the model over that of the reference."""
        return exp(self.difference)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values, which know neither nan nor inf: both become null."""
        plain = {
            "metrics_version": METRICS_VERSION,
            "path": self.path,
            "reference": self.reference,
            **asdict(self.conditions),
            "prefix": list(self.conditions.prefix),
            "kl": self.kl.to_json(),
            "by_confidence": [asdict(each) for each in self.bins],
            "noise_floor": self.floor and {"dtype": self.floor.dtype, **self.floor.kl.to_json()},
            "nll_reference": self.nll_reference,
            "nll_reference_stderr": self.nll_reference_stderr,
            "nll": self.nll,
            "nll_stderr": self.nll_stderr,
            "difference": self.difference,
            "difference_stderr": self.difference_stderr,
            "perplexity_reference": exp(self.nll_reference),
            "perplexity": self.perplexity,
            "perplexity_ratio": self.perplexity_ratio,
            "bytes_on_disk": self.bytes_on_disk,
            "reference_bytes": self.reference_bytes,
            "seconds": round(self.seconds, 2),
        }
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}

    def summary(self) -> list[str]:
        """The result in a few lines."""
        kl, many = self.kl, self.conditions.windows > 1
        error, agreed = (f" ± {kl.stderr:.2g}", f" ± {kl.top1_stderr:.2%}") if many else ("", "")
        moved = f" ± {self.difference_stderr:.4f}" if many else ""
        tail = ", ".join(f"{percent:g}% {kl.at(percent):.3g}" for percent in (90.0, 99.0, 99.9))
        lines = [
            f"KL {kl.mean:.4g}{error} nats per token  ({self.path} against {self.reference})",
            f"median {kl.at(50.0):.3g}, {tail}, maximum {kl.maximum:.3g}",
            f"same most likely token: {kl.top1:.2%}{agreed}",
            f"perplexity {exp(self.nll_reference):.3f} → {self.perplexity:.3f},"
            f" {self.perplexity_ratio - 1:+.2%}; nll {self.difference:+.4f}{moved}",
        ]
        for each in self.bins:
            share = each.tokens / kl.tokens
            lines.append(
                f"  reference {each.low:.0%} to {each.high:.0%} sure ({share:.0%} of tokens): KL {each.mean:.3g},"
                f" same token {each.top1:.1%}"
            )
        if self.floor:
            over = f", {kl.mean / self.floor.kl.mean:,.0f} times below" if self.floor.kl.mean > 0 else ""
            lines.append(
                f"16-bit noise floor: KL {self.floor.kl.mean:.2g}, 99.9% {self.floor.kl.at(99.9):.2g}{over}"
                f" ({self.reference} in {self.floor.dtype}, {self.floor.kl.tokens:,} tokens)"
            )
        return [*lines, self.conditions.line()]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models against one reference, over the same tokens.

    Attributes:
        results: one per model, in the order in which they were given.
    """

    reference: str
    results: tuple[Divergence, ...]

    def to_json(self) -> dict[str, Any]:
        """The results as JSON values."""
        return {"reference": self.reference, "results": [each.to_json() for each in self.results]}

    def rows(self) -> list[tuple[str, ...]]:
        """A table, its head first, the reference second: the name, and figures as text."""
        first = self.results[0]
        many = first.conditions.windows > 1
        head = ("", "size", "perplexity", "change", "KL", "99% KL", "99.9% KL", "same token")
        own = exp(first.nll_reference)
        rows: list[tuple[str, ...]] = [
            head,
            (_name(self.reference), _size(first.reference_bytes), f"{own:.3f}", "", "", "", "", ""),
        ]
        for each in self.results:
            change = f" ± {each.perplexity_ratio * each.difference_stderr:.2%}" if many else ""
            error = f" ± {each.kl.stderr:.2g}" if many else ""
            rows.append(
                (
                    _name(each.path),
                    _size(each.bytes_on_disk),
                    f"{each.perplexity:.3f}",
                    f"{each.perplexity_ratio - 1:+.2%}{change}",
                    f"{each.kl.mean:.4g}{error}",
                    f"{each.kl.at(99.0):.3g}",
                    f"{each.kl.at(99.9):.3g}",
                    f"{each.kl.top1:.2%}",
                )
            )
        if first.floor:
            kl, name = first.floor.kl, f"noise floor ({first.floor.dtype})"
            rows.append(
                (name, "", "", "", f"{kl.mean:.2g}", f"{kl.at(99.0):.2g}", f"{kl.at(99.9):.2g}", f"{kl.top1:.2%}")
            )
        return rows


def kl(path: str | Path, reference: str | Path, **options: Any) -> Divergence:
    """Measure KL(reference || model) per token; both are streamed together, one decoder block in memory at a time.

    Args:
        path: the model, packed or not.
        reference: what it was made of.
        options: as those of `compare`.

    Raises:
        QuantkitError: as `compare`.
    """
    return compare([path], reference=reference, **options).results[0]


@torch.no_grad()
def compare(
    paths: Sequence[str | Path],
    *,
    reference: str | Path | None = None,
    data: str = "builtin-heldout",
    split: str | None = None,
    column: str | None = None,
    window: int = 512,
    stride: int | None = None,
    max_tokens: int | None = None,
    floor_tokens: int = FLOOR_TOKENS,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    emit: Emit = ignore,
) -> Comparison:
    """Measure models against one reference in a single pass over the same tokens.

    Args:
        reference: what the models are compared with; None takes the first of them.
        data: a calibration source; text is joined and tokenized without special tokens.
        window: tokens per window, the tokenizer's prefix (BOS) included.
        stride: tokens from one window to the next; None means windows that do not overlap.
        max_tokens: stop after that many tokens of the data.
        floor_tokens: measure the 16-bit noise floor on about so many of them; 0 measures none.
        dtype: of the forward passes; distributions are compared in float64.

    Raises:
        CheckpointError: a directory cannot be read.
        NumericalError: a model's states or logits are not finite.
        UsageError: the data cannot be used, or the models have different tokenizers.
    """
    started = time.monotonic()
    names = [str(path) for path in paths]
    base = names.pop(0) if reference is None and names else str(reference)
    if not names:
        raise UsageError("there is nothing to compare with", "name two models, or one and `--reference`")
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    models = [Model.open(name, device=where, trust_remote_code=trust_remote_code, emit=emit) for name in (base, *names)]
    corpus = load_corpus(data, split=split, column=column)
    text = _same_text(models, corpus, window, stride, max_tokens, trust_remote_code)
    floor_rows = min(len(text.rows), -(-floor_tokens // text.window))
    scores, noise = run_together(
        models[0], models[1:], text, floor_rows=floor_rows, dtype=kind, device=where, emit=emit
    )
    floor = Floor(_plain(models[0].sixteen), spread(noise, text.scored[:floor_rows])) if noise else None
    conditions = Conditions(
        data=data,
        digest=text.digest,
        tokens=text.tokens,
        windows=len(text.rows),
        window=text.window,
        stride=text.stride,
        prefix=text.prefix,
        bytes=text.bytes,
        words=text.words,
        dtype=_plain(kind),
        device=str(where),
    )
    seconds = time.monotonic() - started
    results = [
        _divergence(model, models[0], conditions, found, text, floor, seconds)
        for model, found in zip(models[1:], scores, strict=True)
    ]
    return Comparison(base, tuple(results))


def _same_text(
    models: Sequence[Model],
    corpus: Corpus,
    window: int,
    stride: int | None,
    max_tokens: int | None,
    trust_remote_code: bool,
) -> Windows:
    """The text as every model reads it; raises UsageError where they read different tokens."""
    texts = [
        read_windows(
            corpus,
            model.path,
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            trust_remote_code=trust_remote_code,
        )
        for model in models
    ]
    for model, text in zip(models, texts, strict=True):
        if not text.agrees_with(texts[0]):
            raise UsageError(
                f"the tokenizers of `{model.name}` and `{models[0].name}` make different tokens of {corpus.source}",
                "compare a model with what it was made of; bits per byte compares others",
            )
    return texts[0]


def _divergence(
    model: Model,
    reference: Model,
    conditions: Conditions,
    scores: TokenScores,
    text: Windows,
    floor: Floor | None,
    seconds: float,
) -> Divergence:
    own, base = window_sums(scores.nll, text.scored), window_sums(scores.nll_reference, text.scored)
    nll, nll_stderr = ratio_estimate(own, text.counts)
    nll_reference, nll_reference_stderr = ratio_estimate(base, text.counts)
    difference, difference_stderr = ratio_estimate(own - base, text.counts)
    return Divergence(
        path=model.name,
        reference=reference.name,
        conditions=conditions,
        kl=spread(scores, text.scored),
        bins=by_confidence(scores),
        floor=floor,
        nll_reference=nll_reference,
        nll_reference_stderr=nll_reference_stderr,
        nll=nll,
        nll_stderr=nll_stderr,
        difference=difference,
        difference_stderr=difference_stderr,
        bytes_on_disk=model.source.checkpoint.nbytes,
        reference_bytes=reference.source.checkpoint.nbytes,
        seconds=seconds,
    )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(path: str) -> str:
    return Path(path).name or path


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
