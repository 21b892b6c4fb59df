"""What `inspect` says of an artifact, the same in all formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from zoo.artifacts import read_all

from quantkit.inspection import inspect

Make = Callable[..., Any]
FOUR = ["compressed-tensors", "gptq", "awq", "modelopt"]
# bytes of 4-bit codes of 2 blocks: q and o 64x64, k and v 32x64, gate and up 96x64, down 64x96
CODES = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) // 2
SCALES = 2 * CODES // 16  # two bytes for 32 codes, which take 16
ZEROS = {"compressed-tensors": 0, "gptq": CODES // 32, "awq": CODES // 32, "modelopt": 0}


@pytest.mark.parametrize("fmt", FOUR)
def test_bytes_are_told_by_kind(make_artifact: Make, fmt: str) -> None:
    path = make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8").path / fmt

    found = inspect(path)

    total = sum(tensor.nbytes for tensor in read_all(path).values())
    kinds = {"codes": CODES, "scales": SCALES, "zero points": ZEROS[fmt]}
    assert found.bytes_by_kind == kinds | {"other": total - sum(kinds.values())}
    symmetry = "asymmetric" if fmt == "awq" else "symmetric"  # AWQ does not say, and stores zero points
    assert found.format == fmt and found.schemes == {f"4-bit, group 32, {symmetry}": 14}
    assert found.summary()[1] == f"  {fmt}: 14 linears 4-bit, group 32, {symmetry}"
    assert [indices for indices, _ in found.structures] == [(0, 1)]


def test_a_plain_checkpoint_has_other_bytes_only(zoo: Callable[..., Any]) -> None:
    found = inspect(zoo("llama"))

    total = sum(tensor.nbytes for tensor in read_all(zoo("llama")).values())
    assert found.bytes_by_kind == {"codes": 0, "scales": 0, "zero points": 0, "other": total}
    assert found.format is None and found.schemes == {}
