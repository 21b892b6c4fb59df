"""`quantkit eval kl` and `eval compare` from the command line to both streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zoo.models import prose

from quantkit.cli.app import run

Make = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(60))
    return str(file)


def test_kl_in_words_and_as_json(make_artifact: Make, text: str, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")
    command = ["eval", "kl", str(made.path), "--reference", str(made.source), "--data", text, "--window", "16"]

    assert run([*command, "--max-tokens", "60"]) == 0
    words = capsys.readouterr()
    assert run([*command, "--max-tokens", "60", "--floor-tokens", "0", "--json", "-q"]) == 0
    value = capsys.readouterr()

    found = json.loads(value.out)
    assert value.err == "" and "block 2/2" in words.err
    assert words.out.startswith(f"KL {found['kl']['mean']:.4g} ± ")
    assert "16-bit noise floor: KL" in words.out and "same most likely token" in words.out
    assert found["noise_floor"] is None and found["reference"] == str(made.source)
    assert found["tokens"] == 56 and found["window"] == 16


def test_compare_prints_one_table(make_artifact: Make, text: str, capsys: Capture) -> None:
    made, other = make_artifact("llama", method="rtn"), make_artifact("llama", method="rtn", bits=8)
    command = [
        "eval",
        "compare",
        str(made.path),
        str(other.path),
        "--data",
        text,
        "--max-tokens",
        "60",
        "--window",
        "16",
    ]

    assert run([*command, "--reference", str(made.source), "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert run([*command, "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert lines[0].split()[:2] == ["size", "perplexity"] and len(lines) == 6
    assert lines[1].startswith("model ") and lines[4].startswith("noise floor (float16)")
    assert "56 tokens of" in lines[5]
    assert found["reference"] == str(made.path)  # the first, where none is named
    assert [each["path"] for each in found["results"]] == [str(other.path)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("eval kl m", "missing option `--reference`"),
        ("eval kl m --reference r --floor-tokens -1", "`--floor-tokens` is -1, and must be at least 0"),
        ("eval compare m", "there is nothing to compare with"),
        ("eval compare", "missing argument"),
        ("eval kl m --reference r --window 1", "`--window` is 1"),
    ],
)
def test_what_cannot_be_measured(arguments: str, error: str, capsys: Capture) -> None:
    assert run(arguments.split()) == 2
    assert error in capsys.readouterr().err


def test_a_missing_model_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert run(["eval", "kl", str(tmp_path / "no"), "--reference", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err
