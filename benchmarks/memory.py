"""Peak memory of `quantkit quantize` by number of decoder blocks, on random weights.

    python benchmarks/memory.py WORK --blocks 1 2 4 8

The blocks have the shape of Llama-3-8B unless options say otherwise. Weights are written one tensor or one block at a
time, and shards are shared between the checkpoints, so WORK needs the size of the largest one, plus one artifact.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import torch
from measured import markdown, quantkit
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

INDEX = "model.safetensors.index.json"


def main() -> int:
    args = arguments()
    shape = (args.hidden, args.intermediate, args.heads, args.kv_heads, args.head_dim, args.vocabulary)
    shards: Path = args.work / "-".join(["shards", *map(str, shape)])
    shards.mkdir(parents=True, exist_ok=True)
    rows = []
    for count in args.blocks:
        model, out = args.work / f"random-{count}-blocks", args.work / f"random-{count}-blocks-quantized"
        size = write_checkpoint(args, count, shards, model)
        cost = quantkit(["quantize", model, "-o", out, *options(args), "--overwrite", "--no-eval", "--json"])
        record = json.loads(cost.output)
        rows.append(
            {
                "blocks": count,
                "checkpoint_bytes": size,
                "peak_bytes": cost.peak,
                "predicted_bytes": record["predicted_peak"],
                "calibration_tokens": record["calibration"]["tokens"],
                "cpu_seconds": cost.cpu,
                "wall_seconds": cost.wall,
            }
        )
        shutil.rmtree(model)
        if not args.keep:
            shutil.rmtree(out)
    if not args.keep:
        shutil.rmtree(shards)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("work", type=lambda text: Path(text).expanduser().resolve(), help="folder for what is written")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of blocks to try")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=128256, help="at least 256")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--keep", action="store_true", help="leave shards and artifacts where they are")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if min(args.blocks) < 1 or args.vocabulary < 256:
        parser.error("at least 1 block and 256 tokens are needed")
    return args


def options(args: argparse.Namespace) -> list[str]:
    sizes = {"group-size": args.group_size, "samples": args.samples, "seq-len": args.seq_len}
    return ["--method", args.method, *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]


def write_checkpoint(args: argparse.Namespace, blocks: int, shards: Path, model: Path) -> int:
    """Write a Llama checkpoint of random BF16 weights whose files are links to shared shards; return its bytes."""
    if model.exists():
        shutil.rmtree(model)
    model.mkdir()
    weight_map: dict[str, str] = {}
    size = 0
    for file, shapes in layout(args, blocks):
        weight_map |= dict.fromkeys(shapes, file)
        size += sum(2 * torch.Size(shape).numel() for shape in shapes.values())
        if not (shards / file).exists():
            write_shard(shards / file, shapes)
        (model / file).symlink_to(shards / file)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (model / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (model / "config.json").write_text(json.dumps(config(args, blocks)), encoding="utf-8")
    write_tokenizer(model)
    return size


def layout(args: argparse.Namespace, blocks: int) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Files and the shapes of their tensors: a block a file, and the embedding and the head in files of their own."""
    hidden, inner, queries, keys = args.hidden, args.intermediate, args.heads, args.kv_heads
    yield "embedding.safetensors", {"model.embed_tokens.weight": (args.vocabulary, hidden)}
    for i in range(blocks):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries * args.head_dim, hidden),
            "self_attn.k_proj": (keys * args.head_dim, hidden),
            "self_attn.v_proj": (keys * args.head_dim, hidden),
            "self_attn.o_proj": (hidden, queries * args.head_dim),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        yield f"block-{i:03d}.safetensors", {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    yield "norm.safetensors", {"model.norm.weight": (hidden,)}
    yield "head.safetensors", {"lm_head.weight": (args.vocabulary, hidden)}


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write one file of random weights, the same for the same file name."""
    generator = torch.Generator().manual_seed(crc32(path.name.encode()))
    unfinished = path.with_suffix(".unfinished")
    save_file({name: weight(shape, generator) for name, shape in shapes.items()}, unfinished, {"format": "pt"})
    unfinished.rename(path)


def weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def config(args: argparse.Namespace, blocks: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": blocks,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def table(rows: list[dict[str, float]]) -> str:
    header = ("blocks", "checkpoint", "peak", "predicted peak", "calibration tokens", "CPU", "wall")
    lines = [
        [
            f"{row['blocks']}",
            *(gigabytes(row[name]) for name in ("checkpoint_bytes", "peak_bytes", "predicted_bytes")),
            f"{row['calibration_tokens']:,}",
            f"{row['cpu_seconds']:.0f} s",
            f"{row['wall_seconds']:.0f} s",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
