"""The checkpoints that clients are given: artifacts, twins of their dequantized weights, and damaged ones.

A twin holds, in 16 bit, the weights that an independent reader makes of an artifact's bytes: a client that reads the
artifact rightly computes nearly the same with both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from formats.independent import dequantize, read_safetensors

_USUAL = ["--method", "gptq", "--group-size", "64", "--samples", "32", "--seq-len", "256", "--quiet"]
WINDOWS, WINDOW = 8, 256  # tokens to score
PLANTED = 0.001  # a scale that ruins a cache which is read through it


def make(model: Path, root: Path) -> dict[str, Path]:
    """Quantize a checkpoint in every way that is tested; what is there already stays. Returns {case: folder}."""
    if not (root / "sym" / "gptq").exists():
        formats = [part for name in ("compressed-tensors", "gptq", "awq") for part in ("--format", name)]
        _quantkit("quantize", model, "-o", root / "sym", *_USUAL, *formats, "--overwrite")
    if not (root / "asym" / "awq").exists():
        formats = ["--format", "compressed-tensors", "--format", "awq"]
        _quantkit("quantize", model, "-o", root / "asym", *_USUAL, "--asymmetric", *formats, "--overwrite")
    if not (root / "cache").exists():
        _quantkit("quantize", model, "-o", root / "cache", *_USUAL, "--kv-cache", "fp8")
    cases = {
        "compressed-tensors": root / "sym" / "compressed-tensors",
        "gptq": root / "sym" / "gptq",
        "awq": root / "sym" / "awq",
        "compressed-tensors, asymmetric": root / "asym" / "compressed-tensors",
        "awq, asymmetric": root / "asym" / "awq",
        "FP8 cache": root / "cache",
    }
    for case, folder in (("twin", "compressed-tensors"), ("twin, asymmetric", "compressed-tensors, asymmetric")):
        cases[case] = twin(cases[folder], root / case.replace(", ", "-"))
    cases["FP8 cache, planted scales"] = with_cache_scales(root / "cache", root / "planted", PLANTED)
    cases["gptq, called asymmetric"] = called_asymmetric(cases["gptq"], root / "called-asymmetric")
    return cases


def windows(model: Path) -> list[list[int]]:
    """Held-out text in windows of tokens."""
    from transformers import AutoTokenizer

    from quantkit.data.builtin import heldout_texts

    tokens = AutoTokenizer.from_pretrained(str(model))("\n\n".join(heldout_texts())).input_ids
    return [tokens[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]


def dequantized(path: Path) -> dict[str, np.ndarray]:
    """{linear: weight float32 [N, K]} of an artifact of one file, read without quantkit."""
    tensors = read_safetensors(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    first = ("weight_packed", "qweight")
    linears = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in first]
    return {linear: dequantize(config, tensors, linear) for linear in linears}


def twin(artifact: Path, out: Path) -> Path:
    """Write the 16-bit checkpoint of an artifact's dequantized weights."""
    from safetensors.numpy import save_file

    if not out.exists():
        _copy(artifact, out)
        weights = dequantized(artifact)
        tensors = read_safetensors(artifact / "model.safetensors")
        plain = {name: array for name, array in tensors.items() if name.rpartition(".")[0] not in weights}
        plain |= {f"{linear}.weight": weight.astype(np.float16) for linear, weight in weights.items()}
        save_file(plain, out / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        del config["quantization_config"]
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def with_cache_scales(artifact: Path, out: Path, scale: float) -> Path:
    """Write an artifact anew with another scale for every K and V."""
    from safetensors.numpy import save_file

    if not out.exists():
        _copy(artifact, out)
        tensors = read_safetensors(artifact / "model.safetensors")
        planted = {
            name: np.full_like(array, scale) if name.endswith(("k_scale", "v_scale")) else array
            for name, array in tensors.items()
        }
        save_file(planted, out / "model.safetensors", metadata={"format": "pt"})
    return out


def called_asymmetric(artifact: Path, out: Path) -> Path:
    """Write a gptq artifact anew whose config says that its zero points are free."""
    if not out.exists():
        _copy(artifact, out)
        config: dict[str, Any] = json.loads((out / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"]["sym"] = False
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def _copy(source: Path, out: Path) -> None:
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("quantkit.json", "quantize_config.json"))


def _quantkit(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "quantkit", *map(str, arguments)], check=True)
