"""The text that a model is measured on: cut into windows that score every token once, and what it holds.

W windows, T tokens of a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.data.corpus import Corpus
from quantkit.data.tokens import evaluation_ids, load_tokenizer, serving_prefix, text_shares
from quantkit.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """A text as a model is measured on it.

    Attributes:
        rows: token ids, int64 [T_i] each, special tokens included.
        scored: tokens at the end of each row that are scored.
        window: longest row.
        stride: tokens of the text from one row to the next.
        prefix: token ids that start every row, as the tokenizer adds them when serving.
        bytes: UTF-8 bytes of the text behind the scored tokens; None where it is not known.
        words: words that begin in that text; None where it is not known.
        digest: sha256 of the corpus.
    """

    rows: list[Tensor]
    scored: list[int]
    window: int
    stride: int
    prefix: tuple[int, ...]
    bytes: int | None
    words: int | None
    digest: str

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return sum(self.scored)

    @property
    def counts(self) -> Tensor:
        """Scored tokens of every row, float64 [W]."""
        return torch.tensor(self.scored, dtype=torch.float64)

    def agrees_with(self, other: Windows) -> bool:
        """Whether both are the same tokens."""
        same = self.scored == other.scored and len(self.rows) == len(other.rows)
        return same and all(torch.equal(a, b) for a, b in zip(self.rows, other.rows, strict=True))


def read_windows(
    corpus: Corpus,
    directory: Path,
    *,
    window: int,
    stride: int | None,
    max_tokens: int | None,
    trust_remote_code: bool = False,
) -> Windows:
    """Tokenize a corpus with the tokenizer in `directory` and cut it into windows.

    Args:
        window: tokens per window, the tokenizer's prefix (BOS) included.
        stride: tokens from one window to the next; None means windows that do not overlap.
        max_tokens: stop after that many tokens of the data.

    Raises:
        CheckpointError: the tokenizer cannot be read.
        UsageError: the data cannot be used, or the window not be scored.
    """
    tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    prefix = serving_prefix(tokenizer)
    step = window - len(prefix) if stride is None else stride
    ids = evaluation_ids(corpus, tokenizer, max_tokens=max_tokens)
    rows, scored = cut_windows(ids, prefix, window, step)
    size, words = None, None
    if (shares := text_shares(corpus, tokenizer, len(ids))) is not None:
        seen = scored_tokens(len(ids), prefix, window, step)
        size, words = (int(share[seen].sum()) for share in shares)
    return Windows(rows, scored, window, step, prefix, size, words, corpus.digest)


def cut_windows(ids: Tensor, prefix: tuple[int, ...], window: int, stride: int) -> tuple[list[Tensor], list[int]]:
    """Cut token ids [T] into windows and say how many tokens at the end of each are scored.

    A window's first token is scored only when the prefix (BOS) stands before it. Every other token is scored exactly
    once: where windows overlap, in the first window that holds it. The last window may be shorter.

    Raises:
        UsageError: the window has no room for a scored token, or stride leaves gaps.
    """
    room = window - len(prefix)
    if room < 2 or not 1 <= stride <= room:
        raise UsageError(
            f"a window of {window} tokens with {len(prefix)} special ones and stride {stride} cannot be scored",
            "use a larger window, and a stride of at most its free room",
        )
    head = torch.tensor(prefix, dtype=torch.int64)
    rows, scored = [], []
    done = 0  # tokens of `ids` that were scored or can never be
    for start in range(0, len(ids), stride):
        part = ids[start : start + room]
        end = start + len(part)
        first_scorable = start if prefix else start + 1
        count = end - max(done, first_scorable)
        if count > 0:
            rows.append(torch.cat([head, part]))
            scored.append(count)
        done = max(done, end)
        if end == len(ids):
            break
    if not rows:
        raise UsageError(f"{len(ids)} tokens leave nothing to score", "give more text")
    return rows, scored


def scored_tokens(count: int, prefix: tuple[int, ...], window: int, stride: int) -> Tensor:
    """Positions of the tokens among `count` that `cut_windows` scores, int64, ascending."""
    rows, scored = cut_windows(torch.arange(count), prefix, window, stride)
    return torch.cat([row[-tail:] for row, tail in zip(rows, scored, strict=True)])


def ratio_estimate(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Token-weighted mean of window sums [W] over counts [W], and its standard error.

    Tokens of a window depend on each other, so windows are the units: for the ratio r = Σ y / Σ n its variance is
    W / (W - 1) Σ (y_i - r n_i)² / (Σ n)² (Cochran, Sampling Techniques, 1977, section 6.3).
    One window has no spread: nan.
    """
    total = float(counts.sum())
    ratio = float(sums.sum()) / total
    units = len(sums)
    if units < 2:
        return ratio, math.nan
    residual = sums - ratio * counts
    return ratio, math.sqrt(units / (units - 1) * float(residual.square().sum())) / total
