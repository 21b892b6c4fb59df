"""Where a run computes, and in which dtype. The only place that asks the machine what it has."""

from __future__ import annotations

import resource
import sys

import torch

from quantkit.errors import ResourceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(text: str) -> torch.device:
    """Turn auto, cpu, cuda or cuda:N into a device of this machine.

    Raises:
        ResourceError: there is no such device.
    """
    count = torch.cuda.device_count()
    if text == "auto":
        return torch.device("cuda:0" if count else "cpu")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ResourceError(
            f"`--device {text}` was asked for, and torch sees {count} CUDA devices", "use `--device cpu`"
        )
    return device


def choose_dtype(text: str, device: torch.device) -> torch.dtype:
    """Turn auto, float32, bfloat16 or float16 into the dtype of forward passes; auto takes what is fast and safe."""
    if text != "auto":
        return DTYPES[text]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    # numerics: without these instructions bfloat16 products run through float32 and cost more than float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def peak_rss() -> int:
    """Largest resident memory of this process so far, bytes."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def current_rss() -> int:
    """Resident memory of this process now, bytes; the peak where the system does not tell."""
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss()
