"""`quantkit fit`: exit code, stdout and stderr together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.app import run
from quantkit.gpus import GPUS

Capture = pytest.CaptureFixture[str]
Make = Callable[..., Any]
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fit") / "llama-70b"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--gpu h200-141gb", 0),
        ("--gpu H200-141GB", 0),
        ("--gpu h200-141gb --concurrency 71", 1),  # 70 sequences fit, with a cache of 8 bits
        ("--gpu h200-141gb --concurrency 70", 0),
        ("--gpu l4-24gb", 1),
        ("--gpu l4-24gb --gpus 8 --context 1024", 0),
        ("--gpu h100-80gb --bits 8", 1),  # the weights alone fit
        ("--gpu h100-80gb --bits 8 --context 64", 0),
        ("--gpu h100-80gb --utilization 0.5", 1),
        ("", 0),
    ],
)
def test_the_exit_code_is_the_answer(arguments: str, code: int, llama: str, capsys: Capture) -> None:
    assert run(["fit", llama, *arguments.split()]) == code

    out, err = capsys.readouterr()
    assert err == "" and out


def test_one_gpu_in_full(llama: str, capsys: Capture) -> None:
    assert run(["fit", llama, "--gpu", "h200-141gb"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama-70b: 70.55 B parameters, 80 layers with a cache, 1 GPU"
    assert " ".join(lines[1].split()) == "weights 16-bit 141.1 GB 4-bit 39.5 GB 4-bit, group 128, symmetric"
    assert "16-bit 327,680 bytes" in lines[2] and "FP8 163,840 bytes" in lines[2]
    assert [line.split()[0] for line in lines if "does not fit" in line] == ["16-bit", "16-bit"]
    assert lines[-1].startswith("tokens/s is the most that memory bandwidth allows")


def test_all_gpus_in_a_line_each(llama: str, capsys: Capture) -> None:
    assert run(["fit", llama]) == 0

    out = capsys.readouterr().out
    assert all(any(line.startswith(f"{name} ") for line in out.splitlines()) for name in GPUS)
    assert "columns: weights + cache; - where the weights alone do not fit" in out


def test_notes_say_what_the_numbers_leave_out(llama: str, capsys: Capture) -> None:
    run(["fit", llama, "--gpu", "a100-80gb", "--context", "9000"])

    out = capsys.readouterr().out
    assert "note: 9,000 tokens are more than the 8,192 positions of the model\n" in out
    assert "note: NVIDIA A100 SXM 80GB has no FP8 arithmetic: an FP8 cache saves memory" in out


def test_json_is_one_object(llama: str, capsys: Capture) -> None:
    assert run(["fit", llama, "--gpu", "h200-141gb", "--json"]) == 0

    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["parameters"] == 70_553_706_496
    assert {name: each["total"] for name, each in found["weights"].items()} == {
        "16-bit": 141_107_412_992,
        "4-bit": 39_500_398_592,
    }
    assert found["cache"]["bytes_per_token"] == {"16-bit": 327_680, "FP8": 163_840}
    assert found["cache"]["page_tokens"] == 16
    assert found["load"] == {"context": 8192, "concurrency": 32, "gpus": 1, "utilization": 0.9}
    assert list(found["gpus"]) == ["h200-141gb"]
    assert [each["sequences"] for each in found["gpus"]["h200-141gb"]["fits"]] == [0, 0, 35, 70]
    assert found["gpus"]["h200-141gb"]["bandwidth_source"]
    assert found["notes"] == []


def test_json_of_all_gpus(llama: str, capsys: Capture) -> None:
    assert run(["fit", llama, "--json"]) == 0

    assert list(json.loads(capsys.readouterr().out)["gpus"]) == list(GPUS)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("--gpu h100-80bg", "`h100-80bg` is no known GPU", "did you mean `h100-80gb`? known are t4-16gb, "),
        ("--gpu zzz", "`zzz` is no known GPU", "known are t4-16gb, "),
        ("--gpus 3", "`--gpus 3` does not divide the model's 64 attention heads", "choose from 1, 2, 4, 8, 16"),
        ("--gpus 0", "`--gpus 0` is less than 1", "pass a positive number"),
        ("--context 0", "`--context 0` is less than 1", "pass a positive number"),
        ("--utilization 90", "`--utilization 90.0` is no part of the memory", "pass 0.9, say"),
        ("--bits 5", "5 bits are not supported", "choose one of 4, 8"),
        ("--group-size 0", "group size 0 is not a size", ""),
        ("--contxt 5", "unknown option `--contxt`", "did you mean `--context`?"),
        ("--context long", "invalid value for `--context`", "see `quantkit fit --help`"),
    ],
)
def test_a_command_line_that_cannot_be_used(arguments: str, error: str, hint: str, llama: str, capsys: Capture) -> None:
    assert run(["fit", llama, *arguments.split()]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {error}")
    assert not hint or f"\nhint: {hint}" in err


def test_a_folder_without_a_config(tmp_path: Path, capsys: Capture) -> None:
    assert run(["fit", str(tmp_path)]) == 2

    assert capsys.readouterr().err.startswith(f"error: `{tmp_path}` is no folder with a config.json")


@pytest.mark.parametrize("option", ["--bits 8", "--group-size 64", "--asymmetric"])
def test_an_artifact_has_its_scheme(option: str, make_artifact: Make, capsys: Capture) -> None:
    made = make_artifact("llama", method="rtn")

    assert run(["fit", str(made.path), *option.split()]) == 2
    assert "is quantized already, so its scheme is known" in capsys.readouterr().err
    assert run(["fit", str(made.path), "--gpu", "t4-16gb", "--context", "64"]) == 0
    assert "as stored" in capsys.readouterr().out
