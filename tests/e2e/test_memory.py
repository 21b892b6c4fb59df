"""Memory: one block at a time, so that a model of many blocks needs no more than one of few."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.device import current_rss
from quantkit.events import BlockDone
from quantkit.pipeline import quantize
from quantkit.recipe import Recipe

Zoo = Callable[..., Path]
BLOCKS, WARM = 24, 8


def trim() -> None:
    """Give freed memory back, so that what a session freed before does not hide what a run keeps."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.parametrize(("method", "width"), [("rtn", 256), ("gptq", 256), ("awq+gptq", 128)])
def test_blocks_do_not_add_up(zoo: Zoo, calibration: Path, tmp_path: Path, method: str, width: int) -> None:
    size = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    path = zoo("llama", num_hidden_layers=BLOCKS, **size)
    block = 9 * width * width * 2  # bytes: q, o and half of k and v; gate, up and down twice as wide
    resident: list[int] = []
    alive: list[int] = []  # bytes of all tensors behind a block

    def sample(event: Any) -> None:
        if isinstance(event, BlockDone):
            assert event.rss > 0
            trim()
            resident.append(current_rss())
            if event.block in (WARM, BLOCKS - 1):
                gc.collect()
                found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
                alive.append(sum(each.numel() * each.element_size() for each in found if not each.is_meta))

    quantize(
        Recipe(method, group_size=64, calibration=str(calibration), dtype="float32", samples=4),
        str(path),
        tmp_path / "out",
        emit=sample,
    )

    assert len(resident) == BLOCKS and alive[0] > 0
    assert abs(alive[1] - alive[0]) < block / 4
    # far less than the blocks that went by
    assert resident[-1] - resident[WARM] < (BLOCKS - WARM) * block / 3
