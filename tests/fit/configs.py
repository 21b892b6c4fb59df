"""Configs of published models, as folders without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_70B: dict[str, Any] = {
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
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {  # the shapes of DeepSeek-V3, with fewer layers and experts
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}


def folder(path: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A folder that holds config.json and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | changes))
    return path
