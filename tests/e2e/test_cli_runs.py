"""The command line over real runs: exit codes, what is printed, what is written, what is never read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zoo.artifacts import digests, packed_linears, read_all
from zoo.models import prose

from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.app import run

Make = Callable[..., Any]
Zoo = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def usual(calibration: Path) -> list[str]:
    return [
        "--group-size",
        "32",
        "--seq-len",
        "20",
        "--samples",
        "8",
        "--dtype",
        "float32",
        "--calibration",
        str(calibration),
    ]


def test_a_run_prints_the_folder_and_writes_what_the_library_writes(
    make_artifact: Make, usual: list[str], tmp_path: Path, capsys: Capture
) -> None:
    made = make_artifact("llama", method="gptq")
    out = tmp_path / "out"

    assert run(["quantize", str(made.source), "-o", str(out), "--method", "gptq", *usual]) == 0

    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "block 2/2  error 0." in printed.err and "quantized 14 linears with gptq" in printed.err
    assert digests(out) == digests(made.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_json_is_one_object(zoo: Zoo, usual: list[str], tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"

    assert run(["quantize", str(zoo("llama")), "-o", str(out), "--json", "--quiet", "--no-eval", *usual]) == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((out / "quantkit.json").read_text())
    assert "block" not in printed.err and "error" not in printed.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_reads_no_weight(
    zoo: Zoo, usual: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a weight was read")

    path = zoo("qwen2")
    expected = len([name for name in read_all(path) if name.endswith("_proj.weight")])
    monkeypatch.setattr(Checkpoint, "read", refuse)
    monkeypatch.setattr(Checkpoint, "raw_chunks", refuse)

    code = run(
        ["quantize", str(path), "-o", str(tmp_path / "out"), "--dry-run", *(["--json"] if as_json else []), *usual]
    )

    printed = capsys.readouterr().out
    assert code == 0 and not (tmp_path / "out").exists()
    if as_json:
        plan = json.loads(printed)
        assert plan["packed"] == expected and plan["blocks"] == 3 and plan["output_bytes"] < plan["source_bytes"]
    else:
        assert f"Plan  3 blocks · {expected} linears → 4-bit, group 32, symmetric" in printed


def test_the_plan_foretells_the_files(make_artifact: Make) -> None:
    made = make_artifact("qwen2", method="awq", symmetric=False)

    plan, tensors = made.record.plan, read_all(made.path)

    assert sorted(plan.packed) == packed_linears(tensors)
    (fmt,) = plan.formats
    assert {spec.name for spec in plan.specs(fmt)} == set(tensors)
    assert plan.output_bytes(fmt) == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("strict", [False, True])
def test_a_fallback_under_strict_exits_1_and_keeps_the_artifact(
    zoo: Zoo, usual: list[str], tmp_path: Path, capsys: Capture, strict: bool
) -> None:
    out = tmp_path / "out"
    asked = ["--group-size", "64", "--indivisible", "smaller-group", *(["--strict"] if strict else [])]

    code = run(["quantize", str(zoo("llama")), "-o", str(out), *usual, *asked])

    printed = capsys.readouterr()
    assert code == int(strict)
    assert printed.out == f"{out}\n" and packed_linears(read_all(out))
    assert printed.err.count("warning: model.layers.0.mlp.down_proj: group size 48 instead of 64") == 1
    assert ("2 things were done in another way than asked" in printed.err) is strict


def test_the_recipe_of_an_artifact_repeats_it(make_artifact: Make, tmp_path: Path, capsys: Capture) -> None:
    made = make_artifact("llama", method="awq+gptq", ignore=["k_proj"])
    out = tmp_path / "out"

    assert run(["quantize", str(made.source), "-o", str(out), "--recipe", str(made.path / "quantkit-recipe.yaml")]) == 0

    assert digests(out) == digests(made.path)
    capsys.readouterr()


def test_a_folder_with_something_in_it_is_kept_unless_told(
    zoo: Zoo, make_artifact: Make, usual: list[str], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    command = ["quantize", str(zoo("llama")), "-o", str(out), "--method", "gptq", *usual]

    assert run(command) == 2
    assert [file.name for file in out.iterdir()] == ["config.json"] and (out / "config.json").read_text() == "{}"
    assert "is not empty" in capsys.readouterr().err
    assert run([*command, "--overwrite"]) == 0
    assert digests(out) == digests(make_artifact("llama", method="gptq").path)


@pytest.mark.parametrize("inside", [".", "sub"])
def test_the_source_is_never_the_output(zoo: Zoo, usual: list[str], capsys: Capture, inside: str) -> None:
    path = zoo("llama")
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    assert run(["quantize", str(path), "-o", str(path / inside), "--overwrite", *usual]) == 2

    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert "source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "empty.txt"),
        ("blank.txt", " \n\n", "blank.txt"),
        ("empty.jsonl", "", "empty.jsonl"),
        ("bad.jsonl", "{\n[1]\n\n", "bad.jsonl"),
        ("short.jsonl", '{"input_ids": [5]}\n', "gives a row of 2 tokens"),
        ("foreign.jsonl", '{"input_ids": [5, 127, 9]}\n', "a token outside the vocabulary of 106"),
        (None, "", "none.txt"),
    ],
)
def test_calibration_that_gives_nothing(
    zoo: Zoo, tmp_path: Path, capsys: Capture, name: str | None, content: str, message: str
) -> None:
    file = tmp_path / (name or "none.txt")
    if name:
        file.write_text(content)

    code = run(
        ["quantize", str(zoo("llama")), "-o", str(tmp_path / "out"), "--group-size", "32", "--calibration", str(file)]
    )

    assert code == 2 and not (tmp_path / "out").exists()
    assert message in capsys.readouterr().err


def test_running_text_is_cut_into_windows(zoo: Zoo, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "text.txt"
    file.write_text(prose(200))

    command = ["--group-size", "32", "--calibration", str(file), "--samples", "5", "--seq-len", "16", "--json", "-q"]
    assert run(["quantize", str(zoo("llama", bos=True)), "-o", str(tmp_path / "out"), *command]) == 0

    used = json.loads(capsys.readouterr().out)["calibration"]
    assert (used["rows_used"], used["tokens"], used["kind"]) == (5, 80, "windows")
    assert "each row begins with <s> (1)" in used["special"]


def test_measuring_and_inspecting_an_artifact(make_artifact: Make, tmp_path: Path, capsys: Capture) -> None:
    made = make_artifact("qwen2", method="awq", override=["down_proj: bits=8"], symmetric=False)
    file = tmp_path / "text.txt"
    file.write_text(prose(40))

    assert run(["eval", "perplexity", str(made.path), "--data", str(file), "--window", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert run(["inspect", str(made.path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert run(["inspect", str(made.path)]) == 0
    lines = capsys.readouterr().out

    assert found["tokens"] > 100 and 1 < found["perplexity"] < 1e6
    assert seen["schemes"] == {"4-bit, group 32, asymmetric": 18, "8-bit, group 32, asymmetric": 3}
    tensors = read_all(made.path)
    assert sum(seen["bytes"].values()) == sum(t.numel() * t.element_size() for t in tensors.values())
    assert seen["bytes"]["codes"] == sum(t.numel() * 4 for name, t in tensors.items() if name.endswith("weight_packed"))
    assert "blocks 0-2" in lines and "fold into self_attn.v_proj (linear, one scale per 2 heads): proved" in lines
