"""`quantkit check`: exit code, stdout and stderr together, and what it costs to ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run_alone

from quantkit.cli.app import run

Capture = pytest.CaptureFixture[str]
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def llama(zoo: Callable[..., Path]) -> str:
    return str(zoo("llama"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--target vllm --group-size 32", 0),
        ("--target vllm", 1),  # 64 inputs are no group of 128
        ("--target vllm --group-size 32 --tp 2", 1),  # 48 inputs on each rank
        ("--target vllm --group-size 32 --tp 2 --ignore down_proj", 0),
        ("--target vllm --group-size 32 --tp 3", 1),
        ("--target tensorrt-llm --group-size 32", 1),
        ("--target tensorrt-llm --group-size 32 --format gptq", 1),
        ("--target sglang --group-size 32 --asymmetric --format gptq", 1),
        ("--target vllm --group-size 32 --format modelopt --format awq", 0),
        ("--group-size 32", 0),
        ("", 1),  # of five engines none takes groups of 128
    ],
)
def test_the_exit_code_is_the_answer(arguments: str, code: int, llama: str, capsys: Capture) -> None:
    assert run(["check", llama, *arguments.split()]) == code

    out, err = capsys.readouterr()
    assert err == ""
    assert ("  loads" in out) is (code == 0)


def test_one_engine_in_full(llama: str, capsys: Capture) -> None:
    assert run(["check", llama, "--target", "vllm", "--format", "compressed-tensors"]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{llama}, to be quantized: 14 linears 4-bit, group 128, symmetric"
    assert lines[1] == "vLLM 0.32 on an NVIDIA GPU"
    assert lines[3] == "compressed-tensors  does not load, for 14 linears"
    assert (
        "  `model.layers.*.mlp.down_proj` (64 by 96), 2 linears: 96 input features are not a multiple of"
        in "\n".join(lines)
    )
    assert lines[-1] == "  nearest: `--group-size 32`"


def test_every_engine_in_a_line_each(llama: str, capsys: Capture) -> None:
    assert run(["check", llama, "--group-size", "-1", "--tp", "2"]) == 0

    out = capsys.readouterr().out
    rows = [tuple(line.split()[:2]) for line in out.splitlines()]
    wanted = {("vllm", "awq"), ("sglang", "gptq"), ("tgi", "compressed-tensors"), ("tensorrt-llm", "modelopt")}
    assert wanted <= set(rows)
    assert "note: transformers has no tensor parallelism for quantized models" in out
    assert out.endswith("add `--target` for reasons\n")


def test_verbose_cites_the_facts(llama: str, capsys: Capture) -> None:
    assert run(["check", llama, "--target", "vllm", "--group-size", "32", "--verbose"]) == 0

    assert "utils/marlin_utils.py, 2026-06)" in capsys.readouterr().out


def test_json_is_one_object(llama: str, capsys: Capture) -> None:
    command = ["check", llama, "--target", "vllm", "--ignore", "down_proj", "--group-size", "64", "--json"]

    assert run(command) == 0

    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["model"], found["stored"], found["loads"]) == (llama, None, {"vllm": True})
    assert found["schemes"]["model.layers.0.mlp.down_proj"] is None
    assert found["schemes"]["model.layers.0.mlp.up_proj"] == "4-bit, group 64, symmetric"
    assert [each["format"] for each in found["judgements"] if each["loads"]] == ["compressed-tensors", "awq", "gptq"]
    verdict = found["judgements"][0]["verdicts"][0]
    assert verdict["fact"]["source"] and verdict["kernel"] == "Marlin, padded"


def test_json_of_all_engines(llama: str, capsys: Capture) -> None:
    assert run(["check", llama, "--group-size", "32", "--json"]) == 0

    loads = json.loads(capsys.readouterr().out)["loads"]
    assert loads["vllm"] and loads["transformers"] and not loads["tensorrt-llm"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("--target vlmm", "`--target` is `vlmm`, which is not known", "did you mean `vllm`?"),
        ("--format gtpq", "`--format` is `gtpq`, which is not known", "did you mean `gptq`?"),
        ("--taget vllm", "unknown option `--taget`", "did you mean `--target`?"),
        ("--ignore down_porj", "`--ignore` pattern `down_porj` matches no linear", "did you mean `down_proj`?"),
        ("--bits 3", "3 bits are not supported", "choose one of 4, 8"),
        ("--tp 0", "`--tp` is 0, and must be at least 1", ""),
        ("--target transformers --tp 2", "`transformers` has no tensor parallelism", "leave out `--tp`"),
        ("--override q_proj", "override `q_proj` has no pattern or no changes", "write it as"),
    ],
)
def test_a_question_that_is_none(arguments: str, error: str, hint: str, llama: str, capsys: Capture) -> None:
    assert run(["check", llama, *arguments.split()]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {error}")
    assert not hint or f"\nhint: {hint}" in err


def test_no_such_model(tmp_path: Path, capsys: Capture) -> None:
    assert run(["check", str(tmp_path / "none")]) == 2
    assert run(["check", str(tmp_path)]) == 2

    out, err = capsys.readouterr()
    assert out == "" and err.count("error: ") == 2 and str(tmp_path) in err


@pytest.mark.parametrize(
    "option",
    ["--bits 8", "--group-size 64", "--asymmetric", "--ignore q_proj", "--override q_proj:bits=8", "--kv-cache fp8"],
)
def test_how_an_artifact_is_packed_cannot_be_asked_for(option: str, make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")

    assert run(["check", str(made.path), *option.split()]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert f"is quantized already, and `{option.split()[0].replace('--asymmetric', '--symmetric')}` would change" in err
    assert "hint: leave it out, or name the 16-bit checkpoint" in err


def test_an_artifact_is_judged_as_stored(make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn", format="gptq")

    assert run(["check", str(made.path), "--target", "vllm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stored"] == "gptq"
    assert [each["format"] for each in found["judgements"]] == ["gptq"]

    assert run(["check", str(made.path), "--target", "tensorrt-llm"]) == 1
    assert run(["check", str(made.path), "--target", "vllm", "--format", "awq"]) == 0


def test_it_imports_neither_torch_nor_transformers(llama: str, make_artifact: Make) -> None:
    plain = run_alone("check", llama, "--group-size", 32, "--json")
    stored = run_alone("check", make_artifact("llama", method="rtn").path, "--target", "vllm")

    assert (plain.code, plain.err, plain.heavy) == (0, "", [])
    assert plain.json["loads"]["vllm"]
    assert (stored.code, stored.err, stored.heavy) == (0, "", [])
