"""Every way in which a safetensors header can lie ends in a CheckpointError that names the file."""

from __future__ import annotations

import json
import os
import random
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save, save_file

from quantkit.checkpoint.dtypes import TORCH_DTYPES
from quantkit.checkpoint.header import read_header
from quantkit.checkpoint.sizes import ITEM_BYTES, is_floating
from quantkit.errors import CheckpointError

from .fabricate import entry, raw_file, weights

TWO = b"\0" * 8  # the data of entry()
BROKEN = {
    "empty file": (b"", "0 bytes"),
    "shorter than the length": (b"1234567", "7 bytes"),
    "header length absurd": (b"\xff" * 16, "not a safetensors file"),
    "header over the limit": ((100_000_001).to_bytes(8, "little") + b"{}", "100,000,001"),
    "header past the end": ((10).to_bytes(8, "little") + b"{}", "8 bytes are missing"),
    "no header": (raw_file(b""), "does not start with"),
    "leading space": (raw_file(" {}"), "does not start with"),
    "not JSON": (raw_file("{nope"), "valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "valid JSON"),
    "nested too deep": (raw_file('{"a":' + "[" * 100_000), "valid JSON"),
    "endless number": (raw_file('{"a":' + "1" * 10_000 + "}"), "valid JSON"),
    "text after it": (raw_file("{} x"), "valid JSON"),
    "key twice": (raw_file(f'{{"w": {json.dumps(entry())}, "w": {json.dumps(entry())}}}', TWO), "'w' occurs twice"),
    "field twice": (raw_file('{"w": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 2]}}'), "twice"),
    "entry is a list": (raw_file({"w": []}), "`w` in"),
    "entry without shape": (raw_file({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, TWO), "shape"),
    "unknown dtype": (raw_file({"w": entry("Q4")}, TWO), "'Q4'"),
    "dtype is a list": (raw_file({"w": entry(["F32"])}, TWO), "dtype"),
    "negative size": (raw_file({"w": entry(shape=[-2])}, TWO), "shape"),
    "size is a float": (raw_file({"w": entry(shape=[2.0])}, TWO), "shape"),
    "size is true": (raw_file({"w": entry(shape=[True, 2])}, TWO), "shape"),
    "shape is text": (raw_file({"w": entry(shape="2")}, TWO), "shape"),
    "65 dimensions": (raw_file({"w": entry(shape=[2] + [1] * 64)}, TWO), "shape"),
    "size overflows": (raw_file({"w": entry(shape=[2**62, 2**62])}, TWO), "no machine can hold"),
    "overflow hidden by zero": (raw_file({"w": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}), "no machine"),
    "size past 64 bits": (raw_file({"w": entry(shape=[2**64])}, TWO), "shape"),
    "offsets reversed": (raw_file({"w": entry(offsets=[8, 0])}, TWO), "data_offsets"),
    "offsets negative": (raw_file({"w": entry(offsets=[-8, 0])}, TWO), "data_offsets"),
    "three offsets": (raw_file({"w": entry(offsets=[0, 4, 8])}, TWO), "data_offsets"),
    "size and shape differ": (raw_file({"w": entry(shape=[3])}, TWO), "8 bytes, but F32 [3] takes 12"),
    "overlap": (raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12), "`b` in `x.safetensors` overlaps"),
    "gap": (raw_file({"w": entry(offsets=[4, 12])}, b"\0" * 12), "unused bytes before"),
    "one byte short": (raw_file({"w": entry()}, TWO[:-1]), "truncated: 1 bytes are missing, from `w`"),
    "one byte more": (raw_file({"w": entry()}, TWO + b"\0"), "1 bytes after its last tensor"),
    "data without tensors": (raw_file({}, TWO), "8 bytes after"),
    "metadata is a number": (raw_file({"__metadata__": 1}), "__metadata__"),
    "metadata holds a number": (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "name with an escape": (raw_file({"w\x1b[2J": entry()}, TWO), "unprintable"),
    "name is half a character": (raw_file('{"\\ud800": ' + json.dumps(entry()) + "}", TWO), "unprintable"),
}


@pytest.mark.parametrize(("content", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_file_is_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert words in caught.value.message
    assert "`x.safetensors`" in caught.value.message
    assert caught.value.hint
    assert caught.value.message.isprintable()


def test_lfs_pointer_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 268435456\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer") as caught:
        read_header(path)
    assert "git lfs pull" in caught.value.hint


def test_absent_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="is missing"):
        read_header(path)
    path.symlink_to("blob")
    with pytest.raises(CheckpointError, match="symlink to a missing file, blob"):
        read_header(path)
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(path)


def test_header_agrees_with_the_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = weights()
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path, "sub/x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.size == path.stat().st_size
    raw = path.read_bytes()
    assert {info.name for info in header.tensors} == set(tensors)
    for info in header.tensors:
        tensor = tensors[info.name]
        assert (TORCH_DTYPES[info.dtype], info.shape, info.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert raw[info.start : info.end] == tensor.reshape(-1).view(TORCH_DTYPES["U8"]).numpy().tobytes()
        assert info.file == "sub/x.safetensors"


def test_empty_file_of_the_library_is_valid(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(save({}))
    assert read_header(tmp_path / "x.safetensors").tensors == ()


def test_every_dtype_of_the_table_is_known_to_the_library(tmp_path: Path) -> None:
    assert {dtype: torch_dtype.itemsize for dtype, torch_dtype in TORCH_DTYPES.items()} == ITEM_BYTES
    assert all(is_floating(dtype) == torch_dtype.is_floating_point for dtype, torch_dtype in TORCH_DTYPES.items())
    for dtype, size in ITEM_BYTES.items():
        path = tmp_path / "x.safetensors"
        path.write_bytes(raw_file({"w": entry(dtype, [3], [0, 3 * size])}, b"\1" * 3 * size))
        with safe_open(path, "pt") as library:
            assert library.get_tensor("w").dtype == TORCH_DTYPES[dtype]
        assert read_header(path).tensors[0].nbytes == 3 * size


def test_mutated_headers_never_raise_anything_else_nor_allocate() -> None:
    good = save(weights(), metadata={"format": "pt"})
    length = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    refused = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        tracemalloc.start()
        for _ in range(600):
            path.write_bytes(_mutate(good, length, rng))
            try:
                read_header(path)
            except CheckpointError:
                refused += 1
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert refused > 300
    assert peak < 2**20


def _mutate(good: bytes, length: int, rng: random.Random) -> bytes:
    raw = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(length)
        action = rng.randrange(4)
        if action == 0:
            raw[at] = rng.randrange(256)
        elif action == 1:
            raw[at : at + 1] = rng.choice([b"9", b"-", b"[", b"}", b'"', b"", b"1e9", b"null"])
        elif action == 2:
            raw[rng.randrange(8)] = rng.choice([0, 1, 127, 255])
        else:
            del raw[-rng.randint(1, 40) :]
    return bytes(raw)


def test_library_accepts_what_survives_mutation() -> None:
    """Nothing that the safetensors library refuses is accepted here."""
    good = save(weights())
    length = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        for _ in range(400):
            path.write_bytes(_mutate(good, length, rng))
            try:
                read_header(path)
            except CheckpointError:
                continue
            with safe_open(path, "pt") as library:
                library.keys()
