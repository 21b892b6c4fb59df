"""Whether the text that a model is measured on was also calibrated on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.data.corpus import load_corpus
from quantkit.data.tokens import evaluation_ids, load_tokenizer, tokenize
from quantkit.recipe import Recipe

# tokens in a row that two texts hardly share by chance: boilerplate such as a licence does
SPAN = 32
_SEED = 20240607


def shared_share(recipe: Recipe, path: Path, data: str, tokens: int) -> float:
    """Share of the passages of SPAN tokens of the evaluated text that a run's calibration rows hold as well.

    Args:
        path: the source's directory.

    Raises:
        UsageError: a text cannot be used.
    """
    tokenizer = load_tokenizer(path, trust_remote_code=recipe.trust_remote_code)
    corpus = load_corpus(recipe.calibration, split=recipe.calibration_split, column=recipe.calibration_column)
    rows = tokenize(corpus, tokenizer, samples=recipe.samples, seq_len=recipe.seq_len, seed=recipe.seed).rows
    return shared(evaluation_ids(load_corpus(data), tokenizer, max_tokens=tokens), rows)


def shared(ids: Tensor, rows: Sequence[Tensor], span: int = SPAN) -> float:
    """Share of the passages of `span` tokens of `ids` [T] that stand in one of `rows`, int64 [T_i] each."""
    wanted = _marks(ids, span)
    known = [marks for row in rows if len(marks := _marks(row, span))]
    if not len(wanted) or not known:
        return 0.0
    return float(torch.isin(wanted, torch.cat(known)).double().mean())


def _marks(ids: Tensor, span: int) -> Tensor:
    """A number for every passage of `span` tokens, int64: the same for the same tokens, and hardly for others."""
    if len(ids) < span:
        return ids[:0]
    generator = torch.Generator().manual_seed(_SEED)
    factors = torch.randint(-(2**62), 2**62, (span,), generator=generator)
    return (ids.unfold(0, span, 1) * factors).sum(-1)  # wraps around, as a hash may
