"""Score windows of tokens with transformers: python transformers_client.py CHECKPOINT WINDOWS.json RESULT.json [DTYPE]

A compressed-tensors checkpoint with zero points is dequantized at load, which is how this release takes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    checkpoint, windows, result = sys.argv[1:4]
    dtype = getattr(torch, sys.argv[4] if len(sys.argv) > 4 else "float32")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **loading(checkpoint)).eval()
    scored = []
    with torch.inference_mode():
        for window in json.loads(Path(windows).read_text(encoding="utf-8")):
            tokens = torch.tensor([window])
            logits = model(tokens).logits[0, :-1].float()
            scored.append(logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist())
    Path(result).write_text(json.dumps(scored), encoding="utf-8")


def loading(checkpoint: str) -> dict[str, Any]:
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config", {})
    groups = quantization.get("config_groups", {}).values()
    if all(group["weights"]["symmetric"] for group in groups):
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


if __name__ == "__main__":
    main()
