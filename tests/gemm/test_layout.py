"""The packed layout: what goes in comes out, and every nibble lies where the kernels look for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import UnsupportedScheme
from quantkit.kernels.layout import dequantize, pack, padded, refusal, unpack
from quantkit.ops.affine import dequantize as reference
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme


def weight(
    n: int, k: int, group: int, *, symmetric: bool, seed: int = 0, g_idx: Tensor | None = None
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    scheme = Scheme(4, group, symmetric)
    groups = k // scheme.group(k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(n, groups, generator=generator) + 0.1).bfloat16()
    zero = torch.full((n, groups), 8, dtype=torch.uint8)
    if not symmetric:
        zero = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(codes, scale, zero, scheme, g_idx)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 150),
    groups=st.integers(1, 5),
    group=st.sampled_from((16, 32, 64, 128, -1)),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_is_unpacked(n: int, groups: int, group: int, symmetric: bool, seed: int) -> None:
    k = groups * (20 if group == -1 else group)
    q = weight(n, k, group, symmetric=symmetric, seed=seed)

    p = pack(q, torch.bfloat16)
    codes, zero, scale = unpack(p)

    assert torch.equal(codes, q.codes) and torch.equal(zero, q.zero_point) and torch.equal(scale, q.scale)
    assert torch.equal(dequantize(p), reference(q, torch.bfloat16))
    rows, columns = padded(n, k, group)
    assert rows % 64 == 0 and columns % max(64, group) == 0 and rows - n < 64
    assert p.qweight.shape == (columns // 16, rows // 64, 32, 4) and p.scales.shape == (columns // p.group_size, rows)


def test_each_code_lies_in_the_lane_word_and_nibble_of_its_mma_fragment() -> None:
    n, k = 128, 64
    q = weight(n, k, 32, symmetric=False)
    p = pack(q, torch.float16)

    nibble_of = {(0, 0): 0, (1, 0): 4, (8, 0): 1, (9, 0): 5, (0, 1): 2, (1, 1): 6, (8, 1): 3, (9, 1): 7}
    for row in range(n):
        for column in range(k):
            block, j, r = row // 64, row % 64 // 8, row % 8
            tile, inner = column // 16, column % 16
            t = inner % 8 // 2
            word = int(p.qweight[tile, block, 4 * r + t, j // 2])
            nibble = nibble_of[(inner - 2 * t, j % 2)]
            assert (word >> (4 * nibble)) & 15 == int(q.codes[row, column])
        assert p.scales[0, 64 * block + 8 * r + j] == q.scale[row, 0].half()
        assert p.zeros is not None
        assert (int(p.zeros[1, 8 * block + r]) >> (4 * j)) & 15 == int(q.zero_point[row, 1])


@pytest.mark.parametrize("symmetric", [True, False])
def test_padding_is_zero(symmetric: bool) -> None:
    p = pack(weight(65, 32, 32, symmetric=symmetric), torch.float16)
    whole = type(p)(p.qweight, p.scales, p.zeros, None, 128, 64, p.group_size)

    assert not dequantize(whole)[65:].any() and not dequantize(whole)[:, 32:].any()
    codes, zero, _ = unpack(whole)
    assert torch.equal(codes[65:], zero.repeat_interleave(32, 1)[65:])


@pytest.mark.parametrize("symmetric", [True, False])
def test_scattered_groups_are_packed_through_a_permutation(symmetric: bool) -> None:
    g_idx = torch.randperm(128, generator=torch.Generator().manual_seed(5)).div(32, rounding_mode="floor").int()
    q = weight(70, 128, 32, symmetric=symmetric, g_idx=g_idx)

    p = pack(q, torch.bfloat16)

    assert p.perm is not None and p.perm.dtype == torch.int32
    assert torch.equal(dequantize(p), reference(q, torch.bfloat16))
    ordered = weight(70, 128, 32, symmetric=symmetric, g_idx=torch.arange(128, dtype=torch.int32) // 32)
    assert pack(ordered, torch.bfloat16).perm is None


def test_symmetric_weights_store_no_zero_points() -> None:
    assert pack(weight(64, 64, 64, symmetric=True), torch.float16).zeros is None
    assert pack(weight(64, 64, 64, symmetric=False), torch.float16).zeros is not None


def test_what_the_kernels_cannot_read_is_refused_with_its_reason() -> None:
    uneven = torch.zeros(64, dtype=torch.int32)
    uneven[40:] = 1
    eight = weight(64, 64, 32, symmetric=True)
    cases = {
        "8-bit": QuantizedWeight(eight.codes, eight.scale, eight.zero_point, Scheme(8, 32, True)),
        "groups of 48": weight(64, 96, 48, symmetric=True),
        "unequal": weight(64, 64, 32, symmetric=True, g_idx=uneven),
    }
    for words, q in cases.items():
        assert words in refusal(q)
        with pytest.raises(UnsupportedScheme, match=words):
            pack(q, torch.float16)
    assert refusal(eight) == ""
