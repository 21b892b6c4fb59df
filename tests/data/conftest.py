"""Tokenizers of a few hundred tokens, trained in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

torch.set_num_threads(1)

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "a scale and a zero point describe a group of weights",
    "rows are never padded, so padding never enters a sum",
    "round(weight / scale) + zero_point",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
)


@cache
def _backend(bos: bool, eos: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 4, trainer)
    shape = " ".join(["<s>"] * bos + ["$A"] + ["</s>"] * eos)
    backend.post_processor = processors.TemplateProcessing(single=shape, special_tokens=[("<s>", 0), ("</s>", 1)])
    return backend


def _make(*, bos: bool = False, eos: bool = False, template: str | None = None, max_length: int = 10**9) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(bos, eos),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        model_max_length=max_length,
    )


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Build a byte-level BPE tokenizer; `bos` and `eos` are what it adds when serving."""
    return _make


@pytest.fixture(scope="session")
def plain() -> Any:
    """A tokenizer that adds nothing."""
    return _make()


@pytest.fixture(scope="session")
def with_bos() -> Any:
    """A tokenizer that adds BOS (0), with a chat template that writes BOS itself and refuses system messages."""
    return _make(bos=True, template=TEMPLATE)
