"""Sources: what each name means, and one clear error for what cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.data.corpus import Corpus, by_reason, load_corpus
from quantkit.data.rows import Document
from quantkit.errors import UsageError


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), "utf-8")
    return str(path)


def test_a_text_file_is_one_stream(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "one", "", "two")
    corpus = load_corpus(source)
    assert corpus == Corpus(source, (Document(1, text="one\n\ntwo"),), True, 3, (), (), corpus.digest)


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json-lines", ".JSONL"])
def test_json_lines_are_rows_and_faults_keep_their_lines(tmp_path: Path, suffix: str) -> None:
    corpus = load_corpus(write(tmp_path / f"a{suffix}", '{"text": "a"}', "{", '{"text": ""}', "3", '{"text": "b"}'))
    assert [document.line for document in corpus.documents] == [1, 5]
    assert (corpus.stream, corpus.rows, corpus.empty) == (False, 5, (3,))
    assert corpus.bad == ((2, "bad JSON"), (4, "a number, not an object"))


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    first = load_corpus(write(tmp_path / "a.jsonl", '{"text": "a"}', '{"text": "b"}'))
    spaced = load_corpus(write(tmp_path / "b.jsonl", "", '{ "text": "a", "n": 1}', "{", '{"text": "b"}'))
    swapped = load_corpus(write(tmp_path / "c.jsonl", '{"text": "b"}', '{"text": "a"}'))
    assert first.digest == spaced.digest != swapped.digest
    # a fixed value: digests in old reports stay comparable
    assert first.digest == "14bdec8c77f9feebc3b047fa42657bac4babc6d05439548a956ee1a9edf35eab"


def test_nothing_usable_is_an_error_with_counts_and_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", "{", "null", '{"text": ""}', "{", *["["] * 5)
    with pytest.raises(UsageError) as caught:
        load_corpus(source)
    assert caught.value.message == (
        f"nothing usable in `{source}`: 9 rows read; 7 x bad JSON (lines 1, 4, 5, 6, 7, …); "
        "1 x null (line 2); 1 x empty (line 3)"
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfea\x00"])
def test_files_without_content_are_errors(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="nothing usable"):
        load_corpus(str(tmp_path / name))


def test_the_column_is_read_from_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a", "b"], "text": ["x", "y"]}), tmp_path / "a.parquet")
    corpus = load_corpus(str(tmp_path / "a.parquet"), column="body")
    assert [document.text for document in corpus.documents] == ["a", "b"]


def test_a_missing_file_names_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "calibration.jsonl", "{}")
    with pytest.raises(UsageError, match="does not exist") as caught:
        load_corpus(str(tmp_path / "calibraton.jsonl"))
    assert caught.value.hint == f"did you mean `{tmp_path / 'calibration.jsonl'}`?"
    monkeypatch.chdir(tmp_path)
    for source in ("calibraton.jsonl", "./calibraton.jsonl", "x/y/z.txt", "~/no-such-file.txt", "..\\a", "a.csv"):
        with pytest.raises(UsageError, match="does not exist"):
            load_corpus(source)


def test_files_of_other_kinds_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        load_corpus(str(tmp_path))
    with pytest.raises(UsageError, match=r"unknown file type `\.json`") as caught:
        load_corpus(write(tmp_path / "a.json", "[]"))
    assert "per line" in caught.value.hint
    with pytest.raises(UsageError, match=r"unknown file type `\.csv`"):
        load_corpus(write(tmp_path / "a.csv", "text"))


@pytest.mark.parametrize("source", ["", "  ", "a\0b"])
def test_a_name_that_names_nothing_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="names no calibration source"):
        load_corpus(source)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("builtin", {"split": "train"}),
        ("builtin-heldout", {"column": "text"}),
        ("wikitext", {"split": "test"}),
        ("a.txt", {"column": "text"}),
        ("a.jsonl", {"split": "train"}),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, options: dict
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "a.jsonl", '{"text": "a"}')
    with pytest.raises(UsageError, match="was asked for"):
        load_corpus(source, **options)


class Hub:
    """Stands in for datasets.load_dataset and remembers how it was called."""

    def __init__(self, rows: Any = (), error: Exception | None = None) -> None:
        self.rows, self.error, self.calls, self.read = rows, error, [], 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        if self.error and not self.rows:
            raise self.error
        return self._stream()

    def _stream(self) -> Any:
        for row in self.rows:
            self.read += 1
            yield row
        if self.error:
            raise self.error


def hub(monkeypatch: pytest.MonkeyPatch, rows: Any = (), error: Exception | None = None) -> Hub:
    import datasets

    double = Hub(rows, error)
    monkeypatch.setattr(datasets, "load_dataset", double)
    return double


def test_another_name_is_streamed_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    double = hub(monkeypatch, [{"body": "a"}, {"body": None}, {"body": "b"}])
    corpus = load_corpus("owner/name:config", split="test", column="body")
    assert double.calls == [(("owner/name", "config"), {"split": "test", "streaming": True})]
    assert [(document.line, document.text) for document in corpus.documents] == [(1, "a"), (3, "b")]
    assert (corpus.bad, corpus.stream) == (((2, "`body` is null"),), False)
    load_corpus("owner/name", column="body")
    assert double.calls[1] == (("owner/name", None), {"split": "train", "streaming": True})


def test_the_hub_is_read_only_as_far_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    double = hub(monkeypatch, ({"text": "abcde"} for _ in range(10**9)))
    corpus = load_corpus("owner/name", characters=12)
    assert (len(corpus.documents), corpus.rows, corpus.partial) == (3, 3, True)
    assert double.read == 4


@pytest.mark.parametrize(
    "error",
    [ConnectionError("Couldn't reach\n'owner/name'"), ValueError("Bad split"), RuntimeError("scripts"), KeyError("x")],
)
@pytest.mark.parametrize("rows", [(), ({"text": "a"},)])
def test_a_hub_that_fails_is_one_error_with_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, error: Exception, rows: Any
) -> None:
    hub(monkeypatch, rows, error)
    with pytest.raises(UsageError) as caught:
        load_corpus("owner/name", split="dev")
    assert caught.value.message.startswith("split `dev` of `owner/name` cannot be read from the hub: ")
    assert "\n" not in caught.value.message
    for alternative in (".txt", ".jsonl", ".parquet", "`builtin`"):
        assert alternative in caught.value.hint


def test_a_near_miss_of_a_builtin_name_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    hub(monkeypatch, error=datasets.exceptions.DatasetNotFoundError("no such dataset"))
    with pytest.raises(UsageError, match="no such dataset") as caught:
        load_corpus("buildin")
    assert caught.value.hint.startswith("did you mean `builtin`?")


def test_reasons_group_in_order() -> None:
    assert by_reason([(1, "b"), (2, "a"), (5, "b")]) == {"b": [1, 5], "a": [2]}


def test_loading_local_text_imports_neither_datasets_nor_transformers() -> None:
    code = (
        "import sys; from quantkit.data.corpus import load_corpus; load_corpus('builtin-heldout');"
        "bad = {'datasets', 'transformers', 'torch', 'pyarrow', 'yaml'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
