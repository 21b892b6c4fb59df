"""`quantkit verify`: exit code, stdout and stderr together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.app import run

Capture = pytest.CaptureFixture[str]
Make = Callable[..., Any]


@pytest.fixture
def damaged(make_artifact: Make, tmp_path: Path) -> Path:
    """An artifact without its tokenizer."""
    path = tmp_path / "copy"
    shutil.copytree(make_artifact("llama", method="rtn").path, path)
    (path / "tokenizer.json").unlink()
    return path


def test_nothing_is_wrong(make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")

    assert run(["verify", str(made.path), "--against", str(made.source)]) == 0

    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0] == f"{made.path}, against {made.source}"
    assert lines[-1] == "verified: 13 checks, nothing wrong"
    assert "  weights     ok      14 linears" in lines


def test_without_a_source_it_says_what_is_left_out(make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")

    assert run(["verify", str(made.path)]) == 0

    out = capsys.readouterr().out
    assert out.count("(no source given: pass `--against`)") == 3
    assert out.endswith("verified: 10 checks, nothing wrong\n")


def test_something_is_wrong(damaged: Path, make_artifact: Make, capsys: Capture) -> None:
    source = make_artifact("llama", method="rtn").source

    assert run(["verify", str(damaged)]) == 0  # nothing says that there was a tokenizer
    capsys.readouterr()
    assert run(["verify", str(damaged), "--against", str(source)]) == 1

    out, err = capsys.readouterr()
    assert err == ""
    assert "  files       FAILED  " in out
    assert "      tokenizer.json: of the source is missing\n      → copy it from the source\n" in out
    assert out.endswith("verified: 13 checks, and wrong are files\n")


@pytest.mark.parametrize("wrong", [False, True])
def test_json_is_one_object(wrong: bool, damaged: Path, make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")
    path = damaged if wrong else made.path

    assert run(["verify", str(path), "--against", str(made.source), "--json"]) == int(wrong)

    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["path"], found["against"], found["ok"]) == (str(path), str(made.source), not wrong)
    checks = {check["id"]: check for check in found["checks"]}
    assert len(checks) == 16
    assert checks["codes"] == {
        "id": "codes",
        "status": "ok",
        "looked": 14,
        "unit": "linears",
        "note": "",
        "failures": [],
    }
    assert checks["index"]["status"] == "nothing" and checks["index"]["note"]
    assert [each["name"] for each in checks["files"]["failures"]] == (["tokenizer.json"] if wrong else [])


def test_verbose_names_tensors_on_stderr(make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")

    assert run(["verify", str(made.path), "--verbose"]) == 0

    err = capsys.readouterr().err
    assert "tensor 1/21  lm_head.weight\n" in err
    assert "model.layers.1.mlp.down_proj.weight" in err


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("--agianst x", "unknown option `--agianst`", "did you mean `--against`?"),
        ("--against NOWHERE", "`NOWHERE`", ""),
    ],
)
def test_a_command_line_that_cannot_be_used(
    arguments: str, error: str, hint: str, make_artifact: Make, tmp_path: Path, capsys: Capture
) -> None:
    nowhere = str(tmp_path / "nowhere")
    words = arguments.replace("NOWHERE", nowhere).split()

    assert run(["verify", str(make_artifact("llama", method="rtn").path), *words]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert error.replace("NOWHERE", nowhere) in err and hint in err


def test_what_is_no_artifact(tmp_path: Path, capsys: Capture) -> None:
    assert run(["verify", str(tmp_path / "none")]) == 2
    assert run(["verify", str(tmp_path)]) == 2
    for name in ("awq", "gptq"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert run(["verify", str(tmp_path)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert f"error: `{tmp_path}` holds several artifacts, one a format" in err
    assert f"hint: verify one of `{tmp_path / 'awq'}`, `{tmp_path / 'gptq'}`" in err


def test_an_artifact_that_cannot_be_opened_is_a_finding_and_no_error(
    make_artifact: Make, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(make_artifact("llama", method="rtn").path, path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])

    assert run(["verify", str(path)]) == 1

    out, err = capsys.readouterr()
    assert err == ""
    assert "  headers     FAILED  1 file, 1 wrong\n      model.safetensors: " in out
    assert "  codes       -       nothing to look at (not reached)" in out
