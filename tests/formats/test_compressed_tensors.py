"""compressed-tensors: golden bytes, a reader of our own that shares no code, the library's reader, round trips."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, random_weight

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats import FORMATS
from quantkit.ops.pack import words
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, Scheme

FORMAT = FORMATS["compressed-tensors"]
NAME = "model.layers.0.mlp.down_proj"


def numpy_dequantize(name: str, tensors: dict[str, torch.Tensor], bits: int) -> np.ndarray:
    """Read the layout as its specification words it; float32 [N, K]."""

    def fields(packed: np.ndarray) -> np.ndarray:  # [R, W] -> [R, W * 32 / bits]
        columns = [
            (word >> np.uint32(shift)) & np.uint32(2**bits - 1) for word in packed.T for shift in range(0, 32, bits)
        ]
        return np.stack(columns, axis=1).astype(np.int64) - 2 ** (bits - 1)

    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    q = fields(tensors[f"{name}.weight_packed"].numpy().view(np.uint32))[:, :columns]
    scale = tensors[f"{name}.weight_scale"].float().numpy()
    zero = np.zeros(scale.shape, dtype=np.int64)
    if f"{name}.weight_zero_point" in tensors:
        stored = np.ascontiguousarray(tensors[f"{name}.weight_zero_point"].numpy().T).view(np.uint32)
        zero = fields(stored)[:, :rows].T
    group = columns // scale.shape[1]
    return (q - zero.repeat(group, axis=1)).astype(np.float32) * scale.repeat(group, axis=1)


def dequantized(q: QuantizedWeight) -> torch.Tensor:
    group = q.codes.shape[1] // q.scale.shape[1]
    zero, scale = (t.float().repeat_interleave(group, dim=1) for t in (q.zero_point, q.scale))
    return (q.codes.float() - zero) * scale


schemes = st.builds(Scheme, st.sampled_from([4, 8]), st.sampled_from([8, 16, 24, PER_CHANNEL]), st.booleans())


@settings(deadline=None)
@given(
    scheme=schemes, rows=st.integers(1, 19), groups=st.integers(1, 3), tail=st.integers(0, 7), seed=st.integers(0, 99)
)
def test_unpack_undoes_pack_and_the_other_reader_agrees(
    scheme: Scheme, rows: int, groups: int, tail: int, seed: int
) -> None:
    columns = 8 * groups + tail if scheme.group_size == PER_CHANNEL else scheme.group_size * groups
    q = random_weight(scheme, rows, columns, seed)

    tensors = FORMAT.pack(NAME, q)
    back = FORMAT.unpack(NAME, tensors, scheme, (rows, columns))

    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.zero_point, q.zero_point)
    assert torch.equal(back.scale, q.scale)
    assert back.scheme == scheme
    assert np.array_equal(numpy_dequantize(NAME, tensors, scheme.bits), dequantized(q).numpy())
    written = FORMAT.specs(NAME, scheme, (rows, columns), "BF16")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        name: (DTYPES[dtype], shape) for name, (dtype, shape) in written.items()
    }
    assert all(t.is_contiguous() for t in tensors.values())


def test_the_bytes_of_a_small_asymmetric_weight() -> None:
    q = QuantizedWeight(
        codes=torch.tensor([[*range(8), *range(8, 16)], [*range(15, 7, -1), *range(7, -1, -1)]], dtype=torch.uint8),
        scale=torch.tensor([[0.5, 2.0], [1.0, -0.25]], dtype=torch.float16),
        zero_point=torch.tensor([[3, 12], [10, 1]], dtype=torch.uint8),
        scheme=Scheme(4, 8, symmetric=False),
    )

    found = {name: t.numpy().tobytes().hex(" ") for name, t in FORMAT.pack("m", q).items()}

    assert found == {
        "m.weight_packed": "10 32 54 76 98 ba dc fe ef cd ab 89 67 45 23 01",
        "m.weight_scale": "00 38 00 40 00 3c 00 b4",
        "m.weight_shape": "02 00 00 00 00 00 00 00 10 00 00 00 00 00 00 00",
        # one word per group; row 0 in the low nibble: group 0 holds 3 and 10, group 1 holds 12 and 1
        "m.weight_zero_point": "a3 00 00 00 1c 00 00 00",
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, PER_CHANNEL])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_library_dequantizes_to_the_same_weight(
    bits: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, unpack_from_int32

    scheme = Scheme(bits, group_size, symmetric)
    q = random_weight(scheme, 24, 96, dtype=dtype)
    tensors = {name.removeprefix(f"{NAME}."): t for name, t in FORMAT.pack(NAME, q).items()}

    config = library.quantization.QuantizationConfig(**FORMAT.config({NAME: scheme, "lm_head": None}))
    theirs = PackedQuantizationCompressor.decompress(tensors, config.config_groups["group_0"])["weight"]

    assert torch.equal(theirs.float(), dequantized(q).to(dtype).float())
    signed = unpack_from_int32(tensors["weight_packed"], bits, torch.Size((24, 96)))
    assert torch.equal(signed.to(torch.int16) + scheme.midpoint, q.codes.to(torch.int16))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_library_writes_what_we_read(bits: int, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    scheme = Scheme(bits, 16, symmetric)
    q = random_weight(scheme, 9, 48)

    def signed(codes: torch.Tensor) -> torch.Tensor:
        return (codes.to(torch.int16) - scheme.midpoint).to(torch.int8)

    theirs = {
        "x.weight_packed": pack_to_int32(signed(q.codes), bits),
        "x.weight_scale": q.scale,
        "x.weight_shape": torch.tensor(q.codes.shape),
    }
    if not symmetric:
        theirs["x.weight_zero_point"] = pack_to_int32(signed(q.zero_point), bits, packed_dim=0)

    assert all(torch.equal(theirs[name], tensor) for name, tensor in FORMAT.pack("x", q).items())
    assert torch.equal(FORMAT.unpack("x", theirs, scheme).codes, q.codes)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (Scheme(4, 128), (64, 2752), "2,752 input features are not a multiple of group size 128"),
        (Scheme(4, PER_CHANNEL), (64, 100), "100 input features are not a multiple of 8"),
        (Scheme(8, PER_CHANNEL), (64, 102), "102 input features are not a multiple of 4"),
        (Scheme(4, 32, symmetric=False), (60, 64), "60 output features are not a multiple of 8"),
        (Scheme(8, 32, symmetric=False), (63, 64), "63 output features are not a multiple of 4"),
    ],
)
def test_shapes_that_engines_refuse_are_refused(scheme: Scheme, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(UnsupportedScheme, match=message):
        FORMAT.check(scheme, shape)


def test_the_hint_names_a_group_size_that_fits() -> None:
    with pytest.raises(UnsupportedScheme) as even:
        FORMAT.check(Scheme(4, 128), (64, 2752))
    with pytest.raises(UnsupportedScheme) as odd:
        FORMAT.check(Scheme(4, 128), (64, 136))

    assert even.value.hint == "pass `--group-size 64`, or choose with `--indivisible` what happens to such linears"
    assert odd.value.hint == "choose with `--indivisible` what happens to such linears"


def test_shapes_that_engines_load_are_accepted() -> None:
    FORMAT.check(Scheme(4, 64), (576, 576))
    FORMAT.check(Scheme(4, 32, symmetric=False), (64, 64))
    FORMAT.check(Scheme(8, PER_CHANNEL), (63, 100))


def test_a_symmetric_weight_with_another_zero_point_is_never_written() -> None:
    q = random_weight(Scheme(4, 8), 8, 16)
    q.zero_point[3, 1] = 7

    with pytest.raises(ValueError, match="zero point other than 8"):
        FORMAT.pack(NAME, q)


def test_group_index_is_refused_both_ways() -> None:
    q = random_weight(Scheme(4, 8), 8, 16)
    indexed = QuantizedWeight(q.codes, q.scale, q.zero_point, q.scheme, g_idx=torch.zeros(16, dtype=torch.int32))

    with pytest.raises(UnsupportedScheme, match="group index"):
        FORMAT.pack(NAME, indexed)
    with pytest.raises(CheckpointError, match="weight_g_idx"):
        FORMAT.unpack(NAME, FORMAT.pack(NAME, q) | {f"{NAME}.weight_g_idx": torch.zeros(16)}, q.scheme)


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("weight_packed", None, "`x.weight_packed` is missing"),
        ("weight_scale", None, "`x.weight_scale` is missing"),
        ("weight_shape", None, "`x.weight_shape` is missing"),
        ("weight_zero_point", None, "`x.weight_zero_point` is missing"),
        (
            "weight_packed",
            torch.zeros(8, 3, dtype=torch.int32),
            r"int32 \[8, 3\], and the scheme asks for int32 \[8, 2\]",
        ),
        ("weight_packed", torch.zeros(8, 2, dtype=torch.int64), r"int64 \[8, 2\]"),
        ("weight_scale", torch.zeros(8, 4, dtype=torch.bfloat16), r"`x.weight_scale` is bfloat16 \[8, 4\]"),
        (
            "weight_scale",
            torch.zeros(8, 2, dtype=torch.int32),
            "int32 .8, 2., and the scheme asks for bfloat16 or float16 or float32",
        ),
        ("weight_zero_point", torch.zeros(8, 2, dtype=torch.int32), r"asks for int32 \[1, 2\]"),
        ("weight_shape", torch.tensor([8.0, torch.nan]), "not .out_features, in_features."),
        ("weight_shape", torch.tensor([8, 16, 1]), "not .out_features, in_features."),
        ("weight_shape", torch.tensor([8, 12]), "12 input features, no multiple of 8"),
    ],
)
def test_tensors_that_do_not_fit_the_scheme_are_named(suffix: str, value: torch.Tensor | None, message: str) -> None:
    scheme = Scheme(4, 8, symmetric=False)
    tensors = FORMAT.pack("x", random_weight(scheme, 8, 16))
    if value is None:
        del tensors[f"x.{suffix}"]
    else:
        tensors[f"x.{suffix}"] = value

    with pytest.raises(CheckpointError, match=message):
        FORMAT.unpack("x", tensors, scheme)


def test_a_shape_the_model_does_not_have_is_refused() -> None:
    scheme = Scheme(4, 8)
    tensors = FORMAT.pack("x", random_weight(scheme, 8, 16))

    with pytest.raises(CheckpointError, match=r"holds \[8, 16\], and the model has \[16, 8\]"):
        FORMAT.unpack("x", tensors, scheme, (16, 8))


def test_planned_words_are_packed_words() -> None:
    for bits in (4, 8):
        for count in range(1, 40):
            planned = FORMAT.specs("x", Scheme(bits, PER_CHANNEL), (3, count), "F16")["x.weight_packed"]
            assert planned == ("I32", (3, words(count, bits)))
