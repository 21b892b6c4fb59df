"""What Checkpoint.open refuses, and that reading gives the stored bytes without keeping other pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError

from .fabricate import entry, model_dir, raw_file, same, split, weights, write_index

REPOSITORY = Path(__file__).parents[2]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return caught.value


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return model_dir(tmp_path / "model", *split(weights()))


def weight_map(path: Path) -> dict[str, str]:
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("shards", [lambda t: (t,), split], ids=["one file", "two shards"])
def test_reads_what_the_library_wrote(
    tmp_path: Path, shards: Callable[..., tuple[dict[str, torch.Tensor], ...]]
) -> None:
    tensors = weights()
    ckpt = Checkpoint.open(model_dir(tmp_path / "model", *shards(tensors)))
    assert list(ckpt.tensors) == sorted(tensors)
    assert ckpt.config == {"model_type": "toy"}
    assert ckpt.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    order = list(reversed(tensors))
    read = ckpt.read(order)
    assert list(read) == order
    for name, tensor in tensors.items():
        assert same(read[name], tensor)
        assert b"".join(ckpt.raw_chunks(name, chunk=7)) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_tensors_read_are_independent(sharded: Path) -> None:
    ckpt = Checkpoint.open(sharded)
    ckpt.read(["model.norm.weight"])["model.norm.weight"].zero_()
    assert same(ckpt.read(["model.norm.weight"])["model.norm.weight"], torch.ones(8))


def test_unknown_name(sharded: Path) -> None:
    ckpt = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError, match=r"no tensor `model\.norm\.weigth`") as caught:
        ckpt.read(["model.norm.weigth"])
    assert "`model.norm.weight`" in caught.value.hint


def test_digest_depends_on_headers_and_config_only(tmp_path: Path) -> None:
    tensors = weights()
    one = Checkpoint.open(model_dir(tmp_path / "a", tensors))
    two = Checkpoint.open(model_dir(tmp_path / "b", weights(seed=1)))
    assert one.digest() == two.digest()
    config = Checkpoint.open(model_dir(tmp_path / "c", tensors, config={"model_type": "other"}))
    names = Checkpoint.open(model_dir(tmp_path / "d", {f"{name}x": tensor for name, tensor in tensors.items()}))
    cut = Checkpoint.open(model_dir(tmp_path / "e", *split(tensors)))
    assert len({one.digest(), config.digest(), names.digest(), cut.digest()}) == 4


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert "no directory" in refusal(tmp_path / "absent").message
    (tmp_path / "empty").mkdir()
    assert "empty directory" in refusal(tmp_path / "empty").message
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "GGUF" in refusal(tmp_path / "model.gguf").message
    (tmp_path / "weights.safetensors").write_bytes(b"")
    error = refusal(tmp_path / "weights.safetensors")
    assert "is a file" in error.message and str(tmp_path) in error.hint


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", "pickle"),
        ("consolidated.00.pth", "pickle"),
        ("model.gguf", "GGUF"),
        ("README.md", "no safetensors"),
        ("snapshots", "hub cache"),
    ],
)
def test_directory_without_safetensors_says_what_it_has(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"x")
    error = refusal(tmp_path)
    assert words in error.message and error.hint
    if words == "pickle":
        assert "never loaded" in error.message and "save_pretrained" in error.hint


def test_config_must_be_a_json_object(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", weights())
    for content, words in [("[]", "not an object"), ("{", "valid JSON"), ("version https://git-lfs.x", "Git LFS")]:
        (path / "config.json").write_text(content)
        error = refusal(path)
        assert words in error.message and "`config.json`" in error.message
    (path / "config.json").unlink()
    assert "no `config.json`" in refusal(path).message


def test_truncated_shard_is_named(sharded: Path) -> None:
    os.truncate(sharded / SECOND, (sharded / SECOND).stat().st_size - 1)
    assert f"`{SECOND}` is truncated: 1 bytes are missing" in refusal(sharded).message


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / FIRST).unlink()
    assert f"`{FIRST}` is missing" in refusal(sharded).message


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors"]
)
def test_index_must_not_lead_out(sharded: Path, file: str) -> None:
    write_index(sharded, weight_map(sharded) | {"w": file})
    assert "inside the directory" in refusal(sharded).message


@pytest.mark.parametrize("file", [3, None, "model.bin", "", "C:x.safetensors", "x" * 300 + ".safetensors"])
def test_index_must_name_safetensors_files(sharded: Path, file: object) -> None:
    write_index(sharded, weight_map(sharded) | {"w": file})
    message = refusal(sharded).message
    assert "`w`" in message or "is missing" in message


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_index_without_a_map(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "weight_map" in refusal(sharded).message


def test_index_with_a_key_twice(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    assert "'a' occurs twice" in refusal(sharded).message


def test_index_lists_a_tensor_that_no_file_has(sharded: Path) -> None:
    write_index(sharded, weight_map(sharded) | {"ghost": FIRST})
    message = refusal(sharded).message
    assert "`ghost`" in message and "no file has it" in message


def test_index_sends_a_tensor_to_the_wrong_file(sharded: Path) -> None:
    mapped = weight_map(sharded)
    name = next(name for name, file in mapped.items() if file == FIRST)
    write_index(sharded, mapped | {name: SECOND})
    message = refusal(sharded).message
    assert f"`{name}`" in message and f"it is in `{FIRST}`" in message


def test_shard_has_a_tensor_that_the_index_lacks(sharded: Path) -> None:
    mapped = weight_map(sharded)
    file = mapped.pop("model.norm.weight")
    write_index(sharded, mapped)
    assert f"`model.norm.weight` in `{file}` is not listed" in refusal(sharded).message


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    first, second = split(weights())
    path = model_dir(tmp_path / "model", first, second | {"model.embed.weight": first["model.embed.weight"]})
    message = refusal(path).message
    assert "`model.embed.weight`" in message and FIRST in message and SECOND in message


def test_single_file_next_to_foreign_shards_is_ambiguous(sharded: Path) -> None:
    save_file(weights(), sharded / "model.safetensors")
    assert "both" in refusal(sharded).message


def test_index_of_the_single_file_is_checked(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", weights())
    write_index(path, dict.fromkeys(weights(), "model.safetensors"))
    assert len(Checkpoint.open(path).tensors) == len(weights())
    write_index(path, {"model.norm.weight": "model.safetensors"})
    assert "not listed" in refusal(path).message


def test_loose_files_without_index(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", *split(weights()))
    (path / "model.safetensors.index.json").unlink()
    assert Checkpoint.open(path).files == (FIRST, SECOND)
    (path / FIRST).rename(path / "consolidated.safetensors")
    assert f"no `{FIRST}`" in refusal(path).message
    (path / SECOND).unlink()
    assert Checkpoint.open(path).files == ("consolidated.safetensors",)


def test_other_safetensors_beside_the_model_do_not_count(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", weights())
    save_file({"x": torch.zeros(1)}, path / "consolidated.safetensors")
    assert Checkpoint.open(path).files == ("model.safetensors",)


def test_hub_cache_layout_of_symlinks(tmp_path: Path) -> None:
    plain = model_dir(tmp_path / "plain", *split(weights()))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(plain.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    ckpt = Checkpoint.open(snapshot)
    assert all(same(tensor, weights()[name]) for name, tensor in ckpt.read(ckpt.tensors).items())
    os.unlink((snapshot / FIRST).resolve())
    assert "symlink to a missing file" in refusal(snapshot).message
    assert "hub cache" in refusal(snapshot.parents[1]).message


def test_source_that_changes_during_a_run(sharded: Path) -> None:
    ckpt = Checkpoint.open(sharded)
    os.truncate(sharded / FIRST, (sharded / FIRST).stat().st_size - 5)
    with pytest.raises(CheckpointError, match="became shorter"):
        ckpt.read(ckpt.tensors)
    (sharded / FIRST).unlink()
    with pytest.raises(CheckpointError, match="cannot be read any more"):
        ckpt.read(ckpt.tensors)


def test_reading_does_not_accumulate_pages(tmp_path: Path) -> None:
    """Resident memory after reading 8 tensors of 40 MiB, one at a time, has grown by little more than one of them."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    size = 40 * 2**20
    header = {f"w{i}": entry("U8", [size], [i * size, (i + 1) * size]) for i in range(8)}
    (tmp_path / "config.json").write_text("{}")
    start = raw_file(header)
    (tmp_path / "model.safetensors").write_bytes(start)
    os.truncate(tmp_path / "model.safetensors", len(start) + 8 * size)  # a hole: takes no disk
    script = """
import sys
from pathlib import Path
import torch
from quantkit.checkpoint.reader import Checkpoint
def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
ckpt = Checkpoint.open(Path(sys.argv[1]))
before, peak = rss(), 0
for name in ckpt.tensors:
    tensor = ckpt.read([name])[name]
    peak = max(peak, rss())
    del tensor
    for part in ckpt.raw_chunks(name): peak = max(peak, rss())
print(peak - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert int(run.stdout) < 2 * size
