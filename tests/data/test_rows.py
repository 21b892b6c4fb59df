"""Rows: each reason has its line, and no input is a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.data import rows
from quantkit.data.corpus import load_corpus
from quantkit.data.rows import Bad, Document, Empty, collect, parse_row, read_jsonl, read_parquet, read_text
from quantkit.errors import QuantkitError, UsageError

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, Document(7, text="a")),
        ({"messages": [MESSAGE]}, Document(7, messages=(MESSAGE,))),
        ({"prompt": "a", "completion": "b"}, Document(7, prompt="a", completion="b")),
        ({"prompt": "", "completion": "b"}, Document(7, prompt="", completion="b")),
        ({"input_ids": [3, 0]}, Document(7, input_ids=(3, 0))),
        ({"text": None, "input_ids": [3]}, Document(7, input_ids=(3,))),
        ({"prompt": "a", "messages": [MESSAGE]}, Document(7, messages=(MESSAGE,))),
        ({"messages": [MESSAGE | {"tool_calls": None}]}, Document(7, messages=(MESSAGE,))),
        ({"text": ""}, Empty(7)),
        ({"text": " \n"}, Empty(7)),
        ({"messages": []}, Empty(7)),
        ({"messages": [{"role": "user", "content": ""}]}, Empty(7)),
        ({"prompt": "", "completion": ""}, Empty(7)),
        ({"input_ids": []}, Empty(7)),
        (None, Bad(7, "null")),
        ([1], Bad(7, "a list, not an object")),
        ("a", Bad(7, "a string, not an object")),
        (3.5, Bad(7, "a number, not an object")),
        ({}, Bad(7, rows.NO_FIELD)),
        ({"content": "a"}, Bad(7, rows.NO_FIELD)),
        ({"text": None}, Bad(7, "`text` is null")),
        ({"text": 3}, Bad(7, "`text` is a number, not a string")),
        ({"text": True}, Bad(7, "`text` is true or false, not a string")),
        ({"text": "\ud800"}, Bad(7, "`text` holds an unpaired surrogate")),
        ({"prompt": "a"}, Bad(7, "`prompt` without `completion`")),
        ({"completion": "a"}, Bad(7, "`completion` without `prompt`")),
        ({"prompt": ["a"], "completion": "a"}, Bad(7, "`prompt` is a list, not a string")),
        ({"messages": "a"}, Bad(7, "`messages` is a string, not a list")),
        ({"messages": ["a"]}, Bad(7, "`messages` holds a message that is not an object")),
        ({"messages": [{"content": "a"}]}, Bad(7, "`messages` holds a message without `role`")),
        (
            {"messages": [{"role": "user", "content": 3}]},
            Bad(7, "`messages` holds a message whose `content` is neither a string nor a list"),
        ),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, Bad(7, "`messages` holds an unpaired surrogate")),
        ({"input_ids": "1 2"}, Bad(7, "`input_ids` is a string, not a list")),
        ({"input_ids": [1, True]}, Bad(7, "`input_ids` holds something that is not a token number")),
        ({"input_ids": [-1]}, Bad(7, "`input_ids` holds something that is not a token number")),
    ],
)
def test_each_row_becomes_a_document_or_its_reason(row: object, expected: object) -> None:
    assert parse_row(row, 7) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", Document(1, text="a")),
        ([MESSAGE], Document(1, messages=(MESSAGE,))),
        ([4, 5], Document(1, input_ids=(4, 5))),
        ([], Empty(1)),
        (None, Bad(1, "`body` is null")),
        (4, Bad(1, "`body` is a number, not a string")),
    ],
)
def test_a_named_column_wins_over_the_usual_ones(value: object, expected: object) -> None:
    assert parse_row({"text": "other", "body": value}, 1, "body") == expected
    assert parse_row({"text": "other"}, 1, "body") == Bad(1, "no field `body`")


@pytest.mark.parametrize("forms", [{}, {"text": "a", "input_ids": (1,)}, {"prompt": "a"}, {"text": "a", "prompt": "b"}])
def test_a_document_has_exactly_one_form(forms: dict) -> None:
    with pytest.raises(ValueError, match="a document holds"):
        Document(1, **forms)


def test_jsonl_lines_are_numbered_from_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "one"}',
        b"{bad",
        b"",
        b"null",
        b'{"text": "\xff"}',
        b'{"text": ""}\r',
        b"[" * 100_000,
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    got = list(read_jsonl(path, None))
    assert got == [
        Document(1, text="one"),
        Bad(2, "bad JSON"),
        Empty(3),
        Bad(4, "null"),
        Bad(5, "not UTF-8"),
        Empty(6),
        Bad(7, "bad JSON"),
    ]


def test_collect_stops_at_the_limit_and_says_so() -> None:
    source = [Document(1, text="abcd"), Bad(2, "null"), Document(3, text="ef"), Empty(4), Document(5, text="g")]
    whole = collect(source, 100)
    assert (len(whole.documents), whole.bad, whole.empty, whole.rows) == (3, ((2, "null"),), (4,), 5)
    assert not whole.partial
    assert not collect(source[:1], 4).partial, "the source ended exactly at the limit"
    cut = collect(source, 5)
    assert ([d.line for d in cut.documents], cut.rows, cut.partial) == ([1, 3], 3, True)


def test_parquet_gives_the_rows_of_the_same_jsonl(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["one", None, "", None, None], pa.string()),
            "messages": pa.array([None, [MESSAGE], None, None, None]),
            "input_ids": pa.array([None, None, None, [5, 6], None], pa.list_(pa.int64())),
            "ignored": [1.0] * 5,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
    expected = [
        Document(1, text="one"),
        Document(2, messages=(MESSAGE,)),
        Empty(3),
        Document(4, input_ids=(5, 6)),
        Bad(5, "`text` is null"),
    ]
    assert list(read_parquet(tmp_path / "a.parquet", None)) == expected
    assert list(read_jsonl(tmp_path / "a.jsonl", None)) == expected


def test_parquet_rows_count_on_over_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_ROWS", 2)
    pq.write_table(pa.table({"body": ["a", "b", None, "d", "e"]}), tmp_path / "a.parquet")
    got = list(read_parquet(tmp_path / "a.parquet", "body"))
    assert [row.line for row in got] == [1, 2, 3, 4, 5]
    assert got[2] == Bad(3, "`body` is null")
    assert got[4] == Document(5, text="e")


def test_parquet_counts_strings_that_are_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    strings = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": strings}), tmp_path / "a.parquet")
    assert list(read_parquet(tmp_path / "a.parquet", None)) == [
        Document(1, text="good"),
        Bad(2, "not UTF-8"),
        Document(3, text="fine"),
    ]


def test_parquet_without_the_columns_names_those_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="no `text`") as caught:
        list(read_parquet(tmp_path / "a.parquet", None))
    assert "body" in caught.value.hint
    with pytest.raises(UsageError, match="no column `nope`"):
        list(read_parquet(tmp_path / "a.parquet", "nope"))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all, but long enough to look at"])
def test_a_broken_parquet_file_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        list(read_parquet(tmp_path / "a.parquet", None))


def test_text_keeps_everything_but_lines_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two\n\xff\xfe\nthr\x00ee\nlast")
    got = read_text(path, 1000)
    assert got.documents == (Document(1, text="one\n\n  two\nlast"),)
    assert got.bad == ((4, "not UTF-8"), (5, "a NUL byte"))
    assert (got.rows, got.empty, got.partial) == (6, (), False)


def test_text_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd\n" * 10)
    got = read_text(tmp_path / "a.txt", 12)
    assert (got.documents[0].text, got.rows, got.partial) == ("abcd\n" * 3, 3, True)
    assert not read_text(tmp_path / "a.txt", 50).partial


keys = st.sampled_from((*rows.FIELDS, "role", "content", "other"))
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
lines_of_json = st.lists(json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20), max_size=8)


@settings(deadline=None)
@given(lines=lines_of_json, column=st.none() | st.sampled_from(["text", "other"]))
def test_any_jsonl_is_counted_or_refused(tmp_path_factory: pytest.TempPathFactory, lines: list, column: object) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        corpus = load_corpus(str(path), column=column)
    except QuantkitError as error:
        assert error.hint and error.exit_code == 2
        return
    seen = [d.line for d in corpus.documents] + [line for line, _ in corpus.bad] + list(corpus.empty)
    assert sorted(seen) == list(range(1, corpus.rows + 1))


@settings(deadline=None)
@given(content=st.binary(max_size=200))
def test_any_text_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.txt"
    path.write_bytes(content)
    try:
        corpus = load_corpus(str(path))
    except UsageError:
        return
    assert corpus.documents[0].text.encode().strip()
    assert corpus.rows == content.count(b"\n") + (not content.endswith(b"\n"))
