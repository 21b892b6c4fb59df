"""Built-in text: enough of it without a network, the same every time, held-out text kept apart."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from quantkit.data import builtin
from quantkit.data.builtin import MODULE_CHARACTERS, calibration_root, calibration_texts
from quantkit.data.corpus import load_corpus
from quantkit.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A calibration folder of our own."""
    monkeypatch.setattr(builtin, "calibration_root", lambda: tmp_path)
    for name in ("text", "heldout"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_documents_are_split_at_separators_and_interleaved(folder: Path) -> None:
    (folder / "text" / "a.txt").write_text("a0\n---\na1\n\n--- not a separator\n---  \n\n---\na2\n---\na3\n")
    (folder / "text" / "b.txt").write_text("b0\n---\nb1")
    first = list(islice(calibration_texts(), 6))
    assert first == ["a0", "b0", "a1\n\n--- not a separator", "a2", "b1", "a3"]


def test_calibration_is_completed_from_python_and_heldout_never(folder: Path) -> None:
    for name in ("text", "heldout"):
        (folder / name / "a.txt").write_text("short")
    assert [document.text for document in load_corpus("builtin-heldout").documents] == ["short"]
    corpus = load_corpus("builtin")
    assert corpus.documents[0].text == "short"
    assert sum(document.size for document in corpus.documents) > 1_700_000, "128 x 2048 tokens and a third to spare"
    assert (corpus.stream, corpus.ranked, corpus.partial) == (True, True, False)
    assert not load_corpus("builtin-heldout").ranked


def test_completion_is_lazy_and_repeats(folder: Path) -> None:
    (folder / "text" / "a.txt").write_text("short")
    small = load_corpus("builtin", characters=50_000)
    assert small.partial
    assert small.digest == load_corpus("builtin", characters=50_000).digest
    assert sum(document.size for document in small.documents) < 50_000 + 100_000
    whole = [document.text for document in load_corpus("builtin").documents]
    assert [document.text for document in small.documents] == whole[: len(small.documents)]


def test_modules_are_library_sources_without_tests() -> None:
    texts = list(builtin._modules())
    assert len(texts) > 100
    assert max(map(len, texts)) <= MODULE_CHARACTERS


def test_tests_packages_and_tables_are_not_walked(tmp_path: Path) -> None:
    used = ["a.py", "b.py", "json/decoder.py", "json/encoder.py"]
    skipped = [
        "test/test_json.py",
        "unittest/mock.py",
        "doctest.py",
        "site-packages/x/y.py",
        "encodings/cp1.py",
        "c.txt",
    ]
    for name in (*skipped, *used):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("pass")
    assert [path.relative_to(tmp_path).as_posix() for path in builtin._sources(tmp_path)] == used


def test_the_text_that_comes_along() -> None:
    calibration = load_corpus("builtin", characters=60_000)
    heldout = load_corpus("builtin-heldout")
    assert not {d.text for d in calibration.documents} & {d.text for d in heldout.documents}
    files = sorted((calibration_root() / "text").glob("*.txt"))
    assert {d.text for d in calibration.documents[: len(files)]} == {builtin._documents(path)[0] for path in files}


def test_an_installation_without_the_text_says_so(folder: Path) -> None:
    with pytest.raises(UsageError, match="is missing"):
        load_corpus("builtin")
