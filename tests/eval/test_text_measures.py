"""Bits per byte and word perplexity: the bytes and words of exactly the text that was scored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from zoo.models import full_model, prose

from quantkit.data.corpus import Corpus, load_corpus
from quantkit.data.rows import Document
from quantkit.data.tokens import load_tokenizer, text_shares
from quantkit.eval.perplexity import Perplexity, perplexity
from quantkit.eval.windows import read_windows, scored_tokens

Zoo = Callable[..., Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(40))
    return file


def measured(path: Path, text: Path, **options: Any) -> Perplexity:
    return perplexity(path, data=str(text), device="cpu", **options)


def corpus_of(*contents: str) -> Corpus:
    documents = tuple(Document(line, text=content) for line, content in enumerate(contents, 1))
    return Corpus("here", documents, True, len(documents), (), (), "digest")


def whole_text(path: Path) -> str:
    """The text as the tokenizer gets it: reading strips the end."""
    return load_corpus(str(path)).documents[0].text or ""


@torch.no_grad()
def total_loss(model: Any, ids: Tensor, prefix: int) -> float:
    """Loss of every token of a text behind a prefix, nats, by one call of the whole model."""
    row = torch.cat([torch.tensor([prefix]), ids])
    logits = model(row[None]).logits[0, :-1].double()
    return -float(logits.log_softmax(-1).gather(1, row[1:, None]).sum())


def test_with_bos_they_are_those_of_the_whole_text(zoo: Zoo, text: Path) -> None:
    path = zoo("llama", bos=True, max_position_embeddings=512)

    found = measured(path, text, window=512)

    content = whole_text(text)
    loss = total_loss(full_model(path), torch.tensor(AutoTokenizer.from_pretrained(path)(content)["input_ids"][1:]), 1)
    words = len(re.split(r"\s+", content.strip()))
    assert found.bytes == len(content.encode())
    assert found.words == words
    assert found.bits_per_byte == pytest.approx(loss / len(content.encode()) / math.log(2), rel=1e-5)
    assert found.word_perplexity == pytest.approx(math.exp(loss / words), rel=1e-3)


@pytest.mark.parametrize(
    ("bos", "window", "stride", "count"), [(False, 16, None, 19), (False, 16, 5, 50), (True, 9, 4, 33)]
)
def test_in_ragged_and_overlapping_windows_they_are_those_of_the_scored_tokens(
    zoo: Zoo, text: Path, bos: bool, window: int, stride: int | None, count: int
) -> None:
    path = zoo("llama", bos=bos)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(whole_text(text), add_special_tokens=False)["input_ids"][:count]

    found = measured(path, text, window=window, stride=stride, max_tokens=count)

    room = window - bos
    starts = () if bos else (0,) if stride else range(0, count, room)  # the first token of a text, or of each window
    scored = [k for k in range(count) if k not in starts]
    pieces = [tokenizer.decode([token]) for token in ids]
    assert found.tokens == len(scored)
    assert found.bytes == sum(len(pieces[k]) for k in scored)
    begin = [k for k in range(count) if len("".join(pieces[: k + 1]).split()) > len("".join(pieces[:k]).split())]
    assert found.words == len([k for k in begin if k in scored])


def test_every_character_belongs_to_one_token(zoo: Zoo) -> None:
    tokenizer = load_tokenizer(zoo("llama"))
    content = "the a\n\n  in  th!  o "

    shares = text_shares(corpus_of(content), tokenizer, 1000)

    assert shares is not None
    size, words = shares
    assert len(size) == len(tokenizer(content, add_special_tokens=False)["input_ids"])
    assert int(size.sum()) == len(content.encode()) and int(words.sum()) == len(content.split())
    assert bool((size >= 0).all()) and bool((words >= 0).all())


class Spelled:
    """A tokenizer whose tokens are UTF-8 bytes; every byte of a character has the place of that character."""

    is_fast = True

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        places = [(k, k + 1) for k, character in enumerate(text) for _ in character.encode()]
        return {"input_ids": list(text.encode()), "offset_mapping": places}


def test_bytes_of_long_characters() -> None:
    size, words = text_shares(corpus_of("é 日本", "x"), Spelled(), 100) or pytest.fail("not known")

    assert size.tolist() == [2, 0, 1, 3, 0, 0, 3, 0, 0, 1, 1, 1]  # the documents are joined by a blank line
    assert words.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_where_the_text_is_not_known_there_are_none(zoo: Zoo, text: Path) -> None:
    tokenizer = load_tokenizer(zoo("llama"))
    given = replace(corpus_of("a"), documents=(Document(1, input_ids=(5, 6, 7)),))

    assert text_shares(given, tokenizer, 3) is None
    assert text_shares(corpus_of("a the"), type("Slow", (), {"is_fast": False})(), 3) is None
    found = replace(measured(zoo("llama"), text, window=16), bytes=None, words=None)
    assert found.bits_per_byte is None and found.word_perplexity is None
    assert found.to_json()["bits_per_byte"] is None
    assert not any("byte" in line for line in found.summary())


def test_the_summary_names_them(zoo: Zoo, text: Path) -> None:
    found = measured(zoo("llama"), text, window=16)

    line = next(line for line in found.summary() if "bits per byte" in line)
    assert f"{found.bits_per_byte:.4f} bits per byte" in line and f"{found.words:,} words" in line
    assert found.to_json()["word_perplexity"] == found.word_perplexity


def test_scored_positions_and_windows_agree(zoo: Zoo, text: Path) -> None:
    corpus = load_corpus(str(text))
    cut = read_windows(corpus, zoo("llama"), window=16, stride=5, max_tokens=50)

    assert len(scored_tokens(50, (), 16, 5)) == cut.tokens == int(cut.counts.sum())
    assert cut.agrees_with(read_windows(corpus, zoo("qwen2"), window=16, stride=5, max_tokens=50))
    assert not cut.agrees_with(read_windows(corpus, zoo("llama"), window=16, stride=6, max_tokens=50))
    assert not cut.agrees_with(read_windows(corpus, zoo("llama", bos=True), window=17, stride=5, max_tokens=50))
