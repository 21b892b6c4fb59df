"""Packing into 32-bit words: golden words, round trips, tails, and that nothing is shared or modified."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.ops.pack import pack_int32, unpack_int32, words


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (4, [0, 1, 2, 3, 4, 5, 6, 7], [0x76543210]),
        (4, [15, 0, 0, 0, 0, 0, 0, 8], [0x8000000F - 2**32]),
        (4, [8, 9, 10, 11, 12, 13, 14, 15, 1], [0xFEDCBA98 - 2**32, 0x1]),
        (8, [1, 2, 3, 4], [0x04030201]),
        (8, [0, 0, 0, 255, 7], [0xFF000000 - 2**32, 0x7]),
    ],
)
def test_the_first_code_is_in_the_lowest_bits(bits: int, codes: list[int], expected: list[int]) -> None:
    packed = pack_int32(torch.tensor([codes], dtype=torch.uint8), bits)

    assert packed.tolist() == [expected]


@settings(deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 5),
    count=st.integers(1, 40),
    seed=st.integers(0, 9),
    view=st.booleans(),
)
def test_unpack_undoes_pack(bits: int, rows: int, count: int, seed: int, view: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8, generator=generator)
    if view:
        codes = codes.T.contiguous().T  # column-major
    before = codes.clone()

    packed = pack_int32(codes, bits)

    assert packed.dtype == torch.int32
    assert packed.shape == (rows, words(count, bits))
    assert packed.is_contiguous()
    assert torch.equal(unpack_int32(packed, bits, count), before)
    packed.zero_()
    assert torch.equal(codes, before)


def test_leading_dimensions_and_slices_are_kept() -> None:
    codes = torch.arange(2 * 3 * 17, dtype=torch.uint8).reshape(2, 3, 17)[..., 1:]  # starts off a word boundary

    assert torch.equal(unpack_int32(pack_int32(codes, 8), 8, 16), codes)
    assert torch.equal(unpack_int32(pack_int32(codes & 15, 4), 4, 16), codes & 15)


@pytest.mark.parametrize(("rows", "count"), [(1, 24), (8, 1), (1, 1), (3, 8)])
@pytest.mark.parametrize("bits", [4, 8])
def test_transposed_views_pack_and_unpack(bits: int, rows: int, count: int) -> None:
    codes = (torch.arange(rows * count, dtype=torch.uint8) & 2**bits - 1).reshape(count, rows).T

    packed = pack_int32(codes, bits)
    elsewhere = packed.T.contiguous().T  # the same words, column-major

    assert torch.equal(unpack_int32(packed, bits, count), codes)
    assert torch.equal(unpack_int32(elsewhere, bits, count), codes)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected torch\.uint8, got torch\.int8"):
        pack_int32(torch.zeros(1, 8, dtype=torch.int8), 4)
    with pytest.raises(ValueError, match="codes of 3 bits"):
        pack_int32(torch.zeros(1, 8, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="17 codes of 4 bits do not fill 2 words"):
        unpack_int32(torch.zeros(1, 2, dtype=torch.int32), 4, 17)
