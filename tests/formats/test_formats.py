"""What holds for every format: round trips, planned shapes, one weight in all of them, refusals, who reads what."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from independent import dequantize, read_safetensors
from safetensors.torch import save_file
from samples import DTYPES, random_weight

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats import FORMATS, Format, reader_of
from quantkit.formats.kv_cache import cache_scale_owner
from quantkit.ops.affine import dequantize as dequantize_here
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, Scheme

NAME = "model.layers.0.mlp.down_proj"
STORED = {"compressed-tensors": "BF16", "gptq": "F16", "awq": "F16", "modelopt": "BF16"}
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def test_the_formats_in_the_order_they_are_offered() -> None:
    assert list(FORMATS) == ["compressed-tensors", "gptq", "awq", "modelopt"]
    assert all(name == fmt.name for name, fmt in FORMATS.items())


def test_the_formats_come_without_torch() -> None:
    script = (
        "import sys; from quantkit.formats import FORMATS; from quantkit.scheme import Scheme\n"
        "for fmt in FORMATS.values():\n"
        "    fmt.check(Scheme(), (256, 256)); fmt.specs('x', Scheme(), (256, 256), fmt.scale_dtypes[0])\n"
        "    fmt.scheme_of(fmt.config({'x': Scheme()}))('x')\n"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


schemes = st.builds(Scheme, st.sampled_from([4, 8]), st.sampled_from([8, 24, 32, PER_CHANNEL]), st.booleans())


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(list(FORMATS)),
    scheme=schemes,
    rows=st.integers(1, 40),
    columns=st.integers(1, 120),
    tiled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_a_format_accepts_it_reads_back(
    name: str, scheme: Scheme, rows: int, columns: int, tiled: bool, seed: int
) -> None:
    fmt, dtype = FORMATS[name], STORED[name]
    shape = (32 * rows, 32 * columns) if tiled and rows * columns < 99 else (rows, columns)
    try:
        fmt.check(scheme, shape, least_zero=1)
    except UnsupportedScheme:
        return
    q = random_weight(scheme, *shape, seed, DTYPES[dtype], least_zero=1)

    tensors = fmt.pack(NAME, q)
    back = fmt.unpack(NAME, tensors, scheme, shape)

    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.zero_point, q.zero_point)
    assert torch.equal(back.scale, q.scale)
    assert (back.scheme, back.g_idx) == (scheme, None)
    planned = fmt.specs(NAME, scheme, shape, dtype)
    assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == {
        key: (DTYPES[kind], size) for key, (kind, size) in planned.items()
    }
    assert tensors.keys() <= {f"{NAME}.{suffix}" for suffix in fmt.suffixes}
    assert f"{NAME}.{fmt.suffixes[0]}" in tensors
    assert all(t.is_contiguous() for t in tensors.values())
    assert all(t.is_contiguous() for t in (back.codes, back.scale, back.zero_point))


def accepted() -> list[tuple[str, Scheme]]:
    pairs = []
    for name, bits, size, symmetric in itertools.product(FORMATS, (4, 8), (32, PER_CHANNEL), (True, False)):
        with contextlib.suppress(UnsupportedScheme):
            FORMATS[name].check(Scheme(bits, size, symmetric), (96, 160), least_zero=1)
            pairs.append((name, Scheme(bits, size, symmetric)))
    return pairs


def test_which_schemes_a_format_has_a_place_for() -> None:
    counts = Counter(name for name, _ in accepted())

    assert counts == {"compressed-tensors": 8, "gptq": 8, "awq": 4, "modelopt": 1}


@pytest.mark.parametrize(("name", "scheme"), accepted(), ids=str)
def test_another_reader_finds_the_same_weight_in_the_file(name: str, scheme: Scheme, tmp_path: Path) -> None:
    fmt = FORMATS[name]
    q = random_weight(scheme, 96, 160, dtype=DTYPES[STORED[fmt.name]], least_zero=1)
    save_file(fmt.pack(NAME, q), tmp_path / "a.safetensors")

    theirs = dequantize(fmt.config({NAME: scheme}), read_safetensors(tmp_path / "a.safetensors"), NAME)

    assert theirs.dtype == np.float32
    assert np.array_equal(theirs, dequantize_here(q).numpy())


def test_one_weight_is_the_same_to_the_last_bit_in_all_formats() -> None:
    scheme = Scheme(4, 64)
    q = random_weight(scheme, 64, 256)

    found = {}
    for name, fmt in FORMATS.items():
        scale = q.scale.to(DTYPES[STORED[name]])
        tensors = fmt.pack(NAME, QuantizedWeight(q.codes, scale, q.zero_point, scheme))
        arrays = {key: (t.float() if t.is_floating_point() else t).numpy() for key, t in tensors.items()}
        found[name] = dequantize(fmt.config({NAME: scheme}), arrays, NAME).tobytes()

    assert set(found.values()) == {dequantize_here(q).numpy().tobytes()}


def test_conversions_share_words() -> None:
    q = random_weight(Scheme(4, 32), 32, 64, dtype=torch.float16)

    theirs = FORMATS["gptq"].pack("x", q)
    ours = FORMATS["compressed-tensors"].pack("x", q)

    assert torch.equal(ours["x.weight_packed"], theirs["x.qweight"].T)
    assert torch.equal(ours["x.weight_scale"], theirs["x.scales"].T)


@every_format
def test_packing_leaves_the_weight_alone_and_shares_no_codes(fmt: Format) -> None:
    q = random_weight(Scheme(4, 32), 32, 64, dtype=DTYPES[STORED[fmt.name]])
    before = q.codes.clone(), q.zero_point.clone()

    tensors = fmt.pack("x", q)
    first = fmt.unpack("x", {key: t.clone() for key, t in tensors.items()}, q.scheme)
    tensors[f"x.{fmt.suffixes[0]}"].zero_()
    again = {key: t.clone() for key, t in fmt.pack("x", q).items()}
    fmt.unpack("x", again, q.scheme)

    assert torch.equal(q.codes, before[0]) and torch.equal(q.zero_point, before[1])
    assert torch.equal(first.codes, before[0])
    assert all(torch.equal(t, again[key]) for key, t in fmt.pack("x", q).items())


@every_format
def test_groups_that_are_not_consecutive_are_never_written(fmt: Format) -> None:
    q = random_weight(Scheme(4, 32), 32, 64, dtype=DTYPES[STORED[fmt.name]])
    indexed = QuantizedWeight(q.codes, q.scale, q.zero_point, q.scheme, torch.zeros(64, dtype=torch.int32))

    with pytest.raises(UnsupportedScheme, match="`x` has a group index"):
        fmt.pack("x", indexed)


@every_format
def test_a_symmetric_weight_with_another_zero_point_is_never_written(fmt: Format) -> None:
    q = random_weight(Scheme(4, 32), 32, 64, dtype=DTYPES[STORED[fmt.name]])
    q.zero_point[3, 1] = 7

    with pytest.raises(ValueError, match="`x` is symmetric with a zero point other than 8"):
        fmt.pack("x", q)


@every_format
def test_scales_of_another_dtype_are_refused(fmt: Format) -> None:
    other = {"F16": torch.bfloat16, "BF16": torch.float64}[STORED[fmt.name]]
    q = random_weight(Scheme(4, 32), 32, 64, dtype=other)

    with pytest.raises(ValueError, match=f"{'b?' if other == torch.bfloat16 else ''}float.* must be one of"):
        fmt.pack("x", q)
    with pytest.raises(ValueError, match="scale_dtype is 'F64', and must be one of"):
        fmt.specs("x", q.scheme, (32, 64), "F64")


@every_format
def test_groups_that_do_not_tile_the_row_are_refused_with_a_size_that_would(fmt: Format) -> None:
    with pytest.raises(UnsupportedScheme, match="2,752 input features are not a multiple of group size 128") as error:
        fmt.check(Scheme(4, 128), (64, 2752))

    assert error.value.hint.startswith("pass `--group-size 64`")


@every_format
@pytest.mark.parametrize("damage", ["missing", "dtype", "shape", "vector"])
def test_a_damaged_tensor_is_named(fmt: Format, damage: str) -> None:
    scheme = Scheme(4, 32, symmetric=fmt.name == "modelopt")
    tensors = fmt.pack("x", random_weight(scheme, 32, 64, dtype=DTYPES[STORED[fmt.name]], least_zero=1))
    optional = ("x.pre_quant_scale", "x.g_idx") if damage == "missing" else ("x.pre_quant_scale",)
    for key, tensor in tensors.items():
        if key in optional or key == "x.weight_shape":
            continue
        broken = dict(tensors)
        if damage == "missing":
            del broken[key]
        elif damage == "dtype":
            broken[key] = tensor.to(torch.int64 if not tensor.is_floating_point() else torch.float64)
        elif damage == "shape":
            broken[key] = tensor[:-1]
        else:
            broken[key] = tensor.flatten()[:7]

        with pytest.raises(CheckpointError, match=r"`x\.\w+`"):
            fmt.unpack("x", broken, scheme, (32, 64))


@every_format
def test_a_shape_the_model_does_not_have_is_refused(fmt: Format) -> None:
    scheme = Scheme(4, 32)
    tensors = fmt.pack("x", random_weight(scheme, 32, 64, dtype=DTYPES[STORED[fmt.name]]))

    with pytest.raises(CheckpointError, match=r"holds \[32, 64\], and the model has \[64, 32\]"):
        fmt.unpack("x", tensors, scheme, (64, 32))
    with pytest.raises(CheckpointError, match=r"`x.\w+` has 64 input features, no multiple of 48"):
        fmt.unpack("x", tensors, Scheme(4, 48))


@every_format
def test_the_config_that_is_written_finds_its_reader(fmt: Format) -> None:
    schemes = {NAME: Scheme(4, 32), "model.layers.0.mlp.up_proj": None, "lm_head": None}
    config = fmt.config(schemes)

    reader = reader_of(config)

    assert reader == fmt
    found = {name: reader.scheme_of(config)(name) for name in schemes}
    assert found == schemes | {NAME: Scheme(4, 32, symmetric=fmt.name != "awq")}


def test_who_reads_what() -> None:
    assert reader_of({"quant_method": "bitsandbytes"}) is None
    assert reader_of({"quant_method": None}) is None
    assert reader_of({}) is None
    assert reader_of({"quant_method": "gptq"}) is FORMATS["gptq"]
    assert reader_of({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}) not in FORMATS.values()


@every_format
def test_nothing_packed_is_nothing_to_describe(fmt: Format) -> None:
    with pytest.raises(UnsupportedScheme, match="no linear is packed"):
        fmt.config({NAME: None, "lm_head": None})


@every_format
def test_scales_of_a_cache_are_recognized_where_they_have_a_place(fmt: Format) -> None:
    specs = fmt.cache_specs("model.layers.3.self_attn")

    owners = [cache_scale_owner(name) for name in specs]
    assert owners == ([("model.layers.3.self_attn", "k"), ("model.layers.3.self_attn", "v")] if specs else [])
    assert bool(specs) == (fmt.name in ("compressed-tensors", "modelopt"))
    owned = {f"model.layers.3.self_attn.k_proj.{suffix}" for suffix in fmt.suffixes}
    assert not owned & specs.keys()
