"""Let the model builder of onnxruntime-genai read a checkpoint, and write what each packed linear means to it.

    python onnxruntime_client.py CHECKPOINT WINDOWS.json RESULT.npz

The builder repacks every linear into a MatMulNBits node. Its codes, scales and zero points are dequantized here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

_NODE = re.compile(r"/model/layers\.(\d+)/(attn|self_attn|mlp)/(\w+)/MatMul")


def main() -> None:
    checkpoint, _, result = sys.argv[1:4]
    with tempfile.TemporaryDirectory() as folder:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        subprocess.run(
            [*builder, "-i", checkpoint, "-o", folder, "-p", "int4", "-e", "cpu", "-c", f"{folder}/cache"], check=True
        )
        np.savez(result, **weights(Path(folder) / "model.onnx"))


def weights(path: Path) -> dict[str, np.ndarray]:
    graph = onnx.load(str(path)).graph
    tensors = {each.name: each for each in graph.initializer}
    found = {}
    for node in graph.node:
        match = _NODE.match(node.name)
        if node.op_type == "MatMulNBits" and match:
            layer, module, linear = match.groups()
            sizes = {each.name: each.i for each in node.attribute}
            parts = [numpy_helper.to_array(tensors[name]) for name in node.input[1:] if name in tensors]
            group = "mlp" if module == "mlp" else "self_attn"
            found[f"model.layers.{layer}.{group}.{linear}"] = dequantize(sizes, *parts)
    return found


def dequantize(
    sizes: dict[str, int], packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None
) -> np.ndarray:
    """(code - zero point) * scale, float32 [N, K]; codes lie along K, the first in the low half of a byte."""
    rows, columns, group = sizes["N"], sizes["K"], sizes["block_size"]
    groups = -(-columns // group)
    codes = halves(packed.reshape(rows, groups, group // 2))
    zero = halves(zeros.reshape(rows, -1))[:, :groups] if zeros is not None else np.full((rows, groups), 8)
    signed = codes.astype(np.float32) - zero.astype(np.float32)[:, :, None]
    return (signed * scales.astype(np.float32).reshape(rows, groups, 1)).reshape(rows, -1)[:, :columns]


def halves(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


if __name__ == "__main__":
    main()
