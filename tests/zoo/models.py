"""Make tiny random checkpoints from transformers' own configs. Imports nothing from quantkit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

VOCABULARY = 128
TOKENS = 106  # of the tokenizer
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# eight layers, so that the pattern of sliding and full attention comes around; windows shorter than the rows
HYBRID = {"num_hidden_layers": 8, "sliding_window": 4}
EXTRA: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "cohere2": HYBRID,
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 4},
    "gemma3_text": HYBRID | {"query_pre_attn_scalar": 16},
    "gpt_neox": {"rotary_pct": 0.25},
    "mistral": {"sliding_window": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen2": {"intermediate_size": 128, "num_hidden_layers": 3},
    "smollm3": {"num_hidden_layers": 4},  # every fourth layer has no rotary embedding
}
TWELVE = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "cohere",
    "gpt_neox",
    "opt",
    "glm4",
)
MORE = ("mistral", "granite", "starcoder2", "phi", "bloom", "smollm3", "cohere2")
EVERY = TWELVE + MORE
BFLOAT16 = ("gemma", "gemma2", "gemma3_text", "qwen3", "olmo2", "cohere2", "smollm3")
SHARDED = ("qwen2", "gemma2", "gpt_neox", "cohere2")


def build(architecture: str, **changes: Any) -> Any:
    """A random float32 model whose norms, biases and weights are all far from trivial."""
    torch.manual_seed(sum(map(ord, architecture)))
    config = AutoConfig.for_model(architecture, **BASE | EXTRA.get(architecture, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.3)
            else:
                parameter.mul_(4)  # as initialized, a block would hardly change its input
            if parameter.ndim == 1 and "norm" in name:
                parameter[5::16] += 2  # channels that are much larger than others, for which rescaling pays
            elif "layers." in name:
                parameter[7::16] *= 3
    return model


def write(architecture: str, path: Path, *, bos: bool = False, **changes: Any) -> Path:
    """Write a checkpoint with a tokenizer beside it."""
    dtype = torch.bfloat16 if architecture in BFLOAT16 else torch.float16
    shard = {"max_shard_size": "100KB"} if architecture in SHARDED else {}
    build(architecture, **changes).to(dtype).save_pretrained(path, **shard)
    write_tokenizer(path, bos=bos)
    return path


def write_tokenizer(path: Path, *, bos: bool = False) -> None:
    """Write a byte-level BPE tokenizer of printable ASCII, which starts texts with <s> where `bos` says so."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("i", "n"), ("Ġ", "o")]
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]
    tokens = [*SPECIAL, *characters, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    shape = "<s> $A" if bos else "$A"
    backend.post_processor = processors.TemplateProcessing(single=shape, special_tokens=[("<s>", 1)] if bos else [])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(path)


def rows(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token rows, int64 [T_i] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, TOKENS, (length,), generator=generator) for length in lengths]


def prose(count: int, seed: int = 0) -> str:
    """Random words, `count` of them, 12 to a line."""
    choice = random.Random(seed).choice
    some = ["".join(choice("abcdehinorst") for _ in range(length)) for length in (1, 2, 3, 4, 5, 6, 7)] + ["the", "a"]
    return "\n".join(" ".join(choice(some) for _ in range(min(12, count - k))) for k in range(0, count, 12)) + "\n"


def full_model(path: Path, **options: Any) -> Any:
    """The checkpoint as transformers loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True, **options).eval()
