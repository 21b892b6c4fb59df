"""Token rows: BOS exactly once, windows that are slices of the text, rows chosen by seed, an account that adds up."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quantkit.data.corpus import Corpus, load_corpus
from quantkit.data.rows import Document
from quantkit.data.tokens import TokenRows, evaluation_ids, load_tokenizer, serving_prefix, tokenize
from quantkit.errors import CheckpointError, UsageError
from quantkit.events import Note

BOS = 0
TEXT = "\n".join(f"{i} the quick brown fox rounds {i * i} weights to {i % 16} of 16 codes" for i in range(60))


def corpus(*documents: Document, stream: bool = False, **fields: Any) -> Corpus:
    """Documents as a corpus read without faults."""
    settings = {"rows": len(documents), "bad": (), "empty": (), "digest": "0" * 64} | fields
    return Corpus("here", documents, stream, **settings)


def texts(*values: str, **fields: Any) -> Corpus:
    return corpus(*(Document(line, text=value) for line, value in enumerate(values, 1)), **fields)


def draw(source: Corpus, tokenizer: Any, *, samples: int = 4, seq_len: int = 16, seed: int = 0) -> TokenRows:
    return tokenize(source, tokenizer, samples=samples, seq_len=seq_len, seed=seed)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_prefix_is_what_serving_adds_in_front(make_tokenizer: Callable[..., Any]) -> None:
    assert serving_prefix(make_tokenizer()) == ()
    assert serving_prefix(make_tokenizer(bos=True)) == (BOS,)
    assert serving_prefix(make_tokenizer(eos=True)) == (), "an end token is no prefix"
    assert serving_prefix(make_tokenizer(bos=True, eos=True)) == (BOS,)


def test_the_prefix_of_a_tokenizer_that_knows_no_word_is_its_bos() -> None:
    class Wordless:
        bos_token_id = 5

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict:
            return {"input_ids": [5] if add_special_tokens else []}

    assert serving_prefix(Wordless()) == (5,)


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (True, True), (False, True)])
def test_windows_are_consecutive_slices_behind_the_prefix(
    make_tokenizer: Callable[..., Any], bos: bool, eos: bool
) -> None:
    tokenizer = make_tokenizer(bos=bos, eos=eos)
    whole = ids(tokenizer, TEXT)
    width = 16 - bos
    drawn = draw(texts(TEXT, stream=True), tokenizer, samples=10**6)
    expected = [[BOS] * bos + whole[i : i + width] for i in range(0, len(whole), width)]
    assert [row.tolist() for row in drawn.rows] == expected
    assert all(row.dtype == torch.int64 and row.ndim == 1 for row in drawn.rows)
    assert len(drawn.rows[-1]) < 16, "the ragged end is used, since windows are too few"
    assert sum(row.tolist().count(BOS) for row in drawn.rows) == bos * len(drawn.rows)


def test_windows_are_chosen_by_seed_and_kept_in_text_order(with_bos: Any) -> None:
    source = texts(TEXT, stream=True)
    every = [row.tolist() for row in draw(source, with_bos, samples=10**6).rows]
    chosen = [[row.tolist() for row in draw(source, with_bos, samples=8, seed=seed).rows] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    for rows in chosen:
        places = [every.index(row) for row in rows]
        assert places == sorted(set(places)) and len(places) == 8
        assert all(len(row) == 16 for row in rows), "no ragged end among enough windows"


def test_exactly_enough_windows_leave_the_ragged_end_out(plain: Any) -> None:
    whole = len(ids(plain, TEXT))
    count, left = divmod(whole, 16)
    assert left
    assert len(draw(texts(TEXT, stream=True), plain, samples=count).rows) == count
    assert len(draw(texts(TEXT, stream=True), plain, samples=count + 1).rows) == count + 1


def test_documents_of_a_stream_are_joined_by_a_blank_line(plain: Any) -> None:
    drawn = draw(texts("one fox", "two dogs", stream=True), plain, samples=100)
    assert torch.cat(drawn.rows).tolist() == ids(plain, "one fox\n\ntwo dogs")
    assert evaluation_ids(texts("one fox", "two dogs"), plain, max_tokens=None).tolist() == ids(
        plain, "one fox\n\ntwo dogs"
    )


def test_a_ranked_corpus_is_read_from_the_front(with_bos: Any) -> None:
    parts = [f"{i} lazy dog rounds down " * 8 for i in range(200)]
    drawn = draw(texts(*parts, stream=True, ranked=True), with_bos, samples=8, seq_len=16)
    text = "".join(with_bos.decode(row[1:]) for row in drawn.rows)
    assert 8 <= drawn.report["usable"] < 100
    assert "150" not in text
    few = draw(texts(*parts, stream=True, ranked=True), with_bos, samples=10**5, seq_len=16)
    assert few.report["tokens"] - few.report["rows_used"] == len(ids(with_bos, "\n\n".join(parts)))


def test_text_rows_get_the_prefix_once_and_no_suffix(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    drawn = draw(texts("lazy dog", "<s>lazy dog"), tokenizer)
    assert [row.tolist() for row in drawn.rows] == [[BOS, *ids(tokenizer, "lazy dog")]] * 2


def test_each_form_becomes_the_tokens_that_serving_sees(with_bos: Any) -> None:
    messages = ({"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"})
    source = corpus(
        Document(1, text="a fox"),
        Document(2, prompt="a f", completion="ox"),
        Document(3, messages=messages),
        Document(4, input_ids=(7, 8, 9)),
    )
    rows = sorted(row.tolist() for row in draw(source, with_bos, seq_len=64).rows)
    text = [BOS, *ids(with_bos, "a fox")]
    chat = with_bos.apply_chat_template(list(messages), tokenize=True, return_dict=False)
    assert rows == sorted([text, text, chat, [7, 8, 9]])
    assert chat.count(BOS) == 1 and with_bos.decode(chat) == "<s>[user] fox?\n[assistant] dog\n"


def test_messages_need_a_template(plain: Any) -> None:
    source = corpus(Document(1, messages=({"role": "user", "content": "hi"},)))
    with pytest.raises(UsageError, match="has no chat template"):
        draw(source, plain)


def test_rows_are_shuffled_by_seed_and_the_first_usable_ones_taken(plain: Any) -> None:
    source = texts(*(f"fox number {i} of many" for i in range(30)))
    every = [row.tolist() for row in draw(source, plain, samples=30).rows]
    assert sorted(every) == sorted(ids(plain, document.text) for document in source.documents)
    assert [row.tolist() for row in draw(source, plain, samples=5).rows] == every[:5]
    assert [row.tolist() for row in draw(source, plain, samples=5, seed=1).rows] != every[:5]


def test_a_row_that_changes_leaves_the_others_alone(plain: Any) -> None:
    first = draw(texts("short fox", "dog " * 9, "weights"), plain, samples=3).rows
    second = draw(texts("another scale", "dog " * 9, "weights"), plain, samples=3).rows
    changed = [not torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert sum(changed) == 1


def test_the_account_names_every_fault_and_line(tmp_path: Path, with_bos: Any) -> None:
    long = "weights " * 50
    lines = [
        '{"text": "a fox jumps"}',
        "{",
        json.dumps({"text": long}),
        '{"text": ""}',
        '{"input_ids": [3]}',
        f'{{"input_ids": [3, {len(with_bos)}]}}',
        '{"messages": [{"role": "system", "content": "x"}]}',
        "null",
        "",
        json.dumps({"text": long}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    notes: list[Any] = []
    source = load_corpus(str(tmp_path / "a.jsonl"))
    drawn = tokenize(source, with_bos, samples=8, seq_len=16, seed=3, emit=notes.append)
    report = drawn.report
    assert report["rows_read"] == 10 and report["usable"] == 6 and report["rows_used"] == 3
    assert report["bad"] == {"count": 2, "lines": [2, 8], "reasons": {"bad JSON": 1, "null": 1}}
    assert report["empty"] == {"count": 2, "lines": [4, 9], "reasons": {"empty": 2}}
    assert report["truncated"] == {"count": 2, "lines": [3, 10], "reasons": {"longer than 16 tokens": 2}}
    assert report["dropped"] == {
        "count": 3,
        "lines": [5, 6, 7],
        "reasons": {
            f"a token outside the vocabulary of {len(with_bos)}": 1,
            "fewer than 2 tokens": 1,
            "refused by the chat template": 1,
        },
    }
    assert report["rows_read"] == sum(report[key]["count"] for key in ("bad", "empty", "dropped")) + report["rows_used"]
    lengths = sorted(len(row) for row in drawn.rows)
    assert [report[key] for key in ("tokens_min", "tokens_median", "tokens_max")] == lengths
    assert (report["tokens"], report["samples"], report["seq_len"], report["seed"]) == (sum(lengths), 8, 16, 3)
    assert report["digest"] == source.digest
    assert report == json.loads(json.dumps(report)), "plain JSON values"
    asked = "8 rows of 16 tokens were asked for"
    assert notes == [Note(f"{asked}; `{source.source}` gives 3 rows, {report['tokens']} tokens in all")]


def test_the_account_shows_twenty_lines_at_most(plain: Any) -> None:
    source = texts("a fox", "the dog", bad=tuple((line, "null") for line in range(1, 31)), rows=32)
    report = draw(source, plain, samples=2).report
    assert report["bad"] == {"count": 30, "lines": list(range(1, 21)), "reasons": {"null": 30}}


def test_the_rows_digest_follows_the_tokens(plain: Any) -> None:
    source = texts(TEXT, stream=True)
    digests = [draw(source, plain, samples=8, seed=seed).report["tokens_digest"] for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    one = draw(corpus(Document(1, input_ids=(1, 2, 3, 4)), Document(2, input_ids=(5, 6))), plain)
    two = draw(corpus(Document(1, input_ids=(1, 2)), Document(2, input_ids=(3, 4, 5, 6))), plain)
    assert one.report["tokens_digest"] != two.report["tokens_digest"]


def test_special_tokens_are_said_in_a_sentence(plain: Any, with_bos: Any) -> None:
    assert draw(texts("a fox"), with_bos).special == "each row begins with <s> (0), as when serving"
    assert draw(texts("a fox"), plain).special == "no BOS: this tokenizer adds none"
    source = corpus(Document(1, input_ids=(1, 2)), Document(2, messages=({"role": "user", "content": "hi"},)))
    assert draw(source, with_bos).special == "messages: as the chat template writes them; tokens: as given"


def test_a_source_not_read_to_its_end_is_said(plain: Any) -> None:
    notes: list[Any] = []
    tokenize(texts("a fox", partial=True), plain, samples=1, seq_len=16, seed=0, emit=notes.append)
    assert notes == [Note("only the first 1 rows of `here` were read, 5 characters")]


def test_no_usable_row_is_an_error_with_the_reasons(plain: Any) -> None:
    source = corpus(Document(1, input_ids=(3,)), Document(2, input_ids=(9999, 1)))
    with pytest.raises(UsageError, match="none of the 2 documents") as caught:
        draw(source, plain)
    assert "1 x fewer than 2 tokens" in caught.value.message
    with pytest.raises(UsageError, match="none of the 1 documents"):
        draw(texts("~", stream=True), plain)


def test_sizes_that_are_none_are_refused(with_bos: Any) -> None:
    with pytest.raises(UsageError, match="0 calibration samples"):
        draw(texts(TEXT, stream=True), with_bos, samples=0)
    with pytest.raises(UsageError, match="2 tokens are too short") as caught:
        draw(texts(TEXT, stream=True), with_bos, seq_len=2)
    assert "at least 3" in caught.value.hint


def test_long_text_brings_no_warning(make_tokenizer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(bos=True, template="{{ messages[0].content }}", max_length=8)
    chat = Document(2, messages=({"role": "user", "content": TEXT},))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        draw(texts(TEXT, stream=True), tokenizer)
        draw(corpus(Document(1, text=TEXT), chat), tokenizer)
        evaluation_ids(texts(TEXT), tokenizer, max_tokens=None)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_evaluation_is_the_whole_text_without_special_tokens(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    whole = ids(tokenizer, TEXT)
    got = evaluation_ids(texts(TEXT, stream=True), tokenizer, max_tokens=None)
    assert got.dtype == torch.int64 and got.tolist() == whole
    assert evaluation_ids(texts(TEXT), tokenizer, max_tokens=50).tolist() == whole[:50]


@settings(deadline=None, max_examples=15)
@given(count=st.integers(2, 400), parts=st.lists(st.sampled_from(TEXT.split("\n")), min_size=2, max_size=30))
def test_evaluation_tokens_are_a_prefix_however_many_are_asked(plain: Any, count: int, parts: list[str]) -> None:
    whole = ids(plain, "\n\n".join(parts))
    assert evaluation_ids(texts(*parts), plain, max_tokens=count).tolist() == whole[:count]


def test_a_cut_evaluation_has_the_tokens_of_the_whole_text() -> None:
    # a tokenizer that merges across the end of a document: x and the newline after it are one token
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("x", "\n")]
    vocabulary = ["a", "x", "\n", *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    source = texts("aaaaaaaax", "aaaaaaaax")
    whole = evaluation_ids(source, tokenizer, max_tokens=None).tolist()
    assert [vocabulary[token] for token in whole] == ["aaaaaaaa", "x\n", "\n", "aaaaaaaa", "x"]
    assert evaluation_ids(source, tokenizer, max_tokens=2).tolist() == whole[:2]


def test_evaluation_of_other_forms_is_in_order(with_bos: Any) -> None:
    source = corpus(Document(1, input_ids=(7, 8)), Document(2, prompt="a ", completion="fox"))
    expected = [7, 8, *ids(with_bos, "a fox")]
    assert evaluation_ids(source, with_bos, max_tokens=None).tolist() == expected
    assert evaluation_ids(source, with_bos, max_tokens=2).tolist() == [7, 8]


def test_evaluation_refuses_what_it_cannot_read(with_bos: Any) -> None:
    with pytest.raises(UsageError, match="line 4 of `here`: a token outside the vocabulary"):
        evaluation_ids(corpus(Document(4, input_ids=(1, 9999))), with_bos, max_tokens=None)
    with pytest.raises(UsageError, match="holds 1 tokens"):
        evaluation_ids(texts("~"), with_bos, max_tokens=None)
    with pytest.raises(UsageError, match="1 evaluation tokens"):
        evaluation_ids(texts("a fox"), with_bos, max_tokens=1)


def test_the_builtin_text_gives_what_calibration_asks(with_bos: Any) -> None:
    drawn = draw(load_corpus("builtin", characters=200_000), with_bos, samples=16, seq_len=256)
    assert [len(row) for row in drawn.rows] == [256] * 16
    assert all(row[0] == BOS for row in drawn.rows)


def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path, with_bos: Any) -> None:
    with_bos.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert serving_prefix(loaded) == (BOS,)
    assert ids(loaded, TEXT) == ids(with_bos, TEXT)
    assert loaded.chat_template == with_bos.chat_template


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": '{"model_type": "llama"}', "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
        {"tokenizer.json": "{}"},
        {"tokenizer.json": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"},
        {"tokenizer.json": '{"version": "1.0", "added_tokens": [], "model": {"type": "NoSuchModel"}}'},
        {"tokenizer_config.json": "{"},
        {"tokenizer_config.json": '{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["x.X", null]}}'},
    ],
)
def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.message and caught.value.hint


def test_a_tokenizer_is_looked_for_in_folders_only(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_tokenizer(tmp_path / "gpt2")
