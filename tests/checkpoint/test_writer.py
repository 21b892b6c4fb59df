"""What goes into an artifact comes out of it, and only what was planned goes in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.header import read_header
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import ArtifactWriter, TensorSpec
from quantkit.errors import CheckpointError, UsageError

from .fabricate import listing, model_dir, same, split, weights
from .written import load, specs_of, write_model, writing


def test_write_takes_views_and_copy_takes_bytes(tmp_path: Path) -> None:
    source = Checkpoint.open(model_dir(tmp_path / "source", *split(weights())))
    kept = [name for name in source.tensors if name != "turned"]
    turned = torch.arange(12, dtype=torch.int32).reshape(3, 4).T.requires_grad_(False)
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    specs = [TensorSpec(name, source.tensors[name].dtype, source.tensors[name].shape) for name in kept]
    specs += [TensorSpec("turned", "I32", (4, 3)), TensorSpec("parameter", "F32", (3, 2))]
    with writing(tmp_path / "out", specs, 300) as writer:
        writer.copy(source, kept)
        writer.write({"turned": turned, "parameter": parameter})
    read = load(tmp_path / "out")
    assert same(read["turned"], turned.contiguous()) and same(read["parameter"], parameter.detach())
    assert all(same(read[name], weights()[name]) for name in kept)


def test_metadata_says_which_framework_wrote_it(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", weights())
    assert read_header(out / "model.safetensors").metadata == {"format": "pt"}


def test_index_counts_the_bytes(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", weights(), shard=300)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    assert not (write_model(tmp_path / "one", weights()) / "model.safetensors.index.json").exists()


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = weights()
    with writing(tmp_path / "out", specs_of(tensors), 300) as writer:
        with pytest.raises(CheckpointError, match="not written"):
            writer.digests()
        writer.write(tensors)
        before = writer.digests()
    files = {file.name: file for file in (tmp_path / "out").glob("*.safetensors")}
    assert before == {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()}


def test_files_get_ordinary_permissions(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", weights())
    (tmp_path / "ordinary").mkdir()
    (tmp_path / "file").touch()
    assert out.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    assert (out / "model.safetensors").stat().st_mode == (tmp_path / "file").stat().st_mode


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"ghost": torch.zeros(1)}, "not in the plan"),
        ({"a": torch.zeros(2).half()}, "`a` is F16 [2], but F32 [2] was planned"),
        ({"a": torch.zeros(1, 2)}, "`a` is F32 [1, 2], but F32 [2] was planned"),
        ({"b": torch.zeros(2)}, "`b` was written already"),
    ],
)
def test_write_refuses_what_was_not_planned(tmp_path: Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    specs = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))]
    with (
        pytest.raises(CheckpointError) as caught,
        writing(tmp_path / "out", specs, 100) as writer,
    ):
        writer.write({"b": torch.zeros(2)})
        writer.write(tensors)
    assert words in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_copy_refuses_another_shape(tmp_path: Path) -> None:
    source = Checkpoint.open(model_dir(tmp_path / "source", weights()))
    specs = [TensorSpec("model.norm.weight", "F32", (9,))]
    writer = ArtifactWriter(tmp_path / "out", specs, max_shard_bytes=100, place=tmp_path / "out")
    with pytest.raises(CheckpointError, match="planned"):
        writer.copy(source, ["model.norm.weight"])
    with pytest.raises(CheckpointError, match="no tensor"):
        writer.copy(source, ["ghost"])


def test_commit_lists_what_is_missing_and_leaves_nothing(tmp_path: Path) -> None:
    specs = [TensorSpec(f"w{number}", "F32", (2,)) for number in range(6)]
    with (
        pytest.raises(CheckpointError, match=r"5 of 6 tensors .* `w1`, `w2`, `w3` and 2 more"),
        writing(tmp_path / "out", specs, 100) as writer,
    ):
        writer.write({"w0": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "", ".", "..\\x", "model.safetensors", "x.safetensors.index.json"]
)
def test_added_file_stays_inside_and_off_the_weights(tmp_path: Path, name: str) -> None:
    writer = ArtifactWriter(tmp_path / "out", specs_of(weights()), max_shard_bytes=300, place=tmp_path / "out")
    with pytest.raises(UsageError):
        writer.add_file(name, b"")


def test_added_files_are_kept_and_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "origin").write_bytes(b"\x00\r\n")
    with writing(tmp_path / "out", specs_of(weights()), 300) as writer:
        writer.add_file("text.json", "ä\n")
        writer.add_file("code/model.py", b"pass")
        writer.copy_file("code/bytes", tmp_path / "origin")
        for call in (
            lambda: writer.add_file("text.json", ""),
            lambda: writer.copy_file("text.json", tmp_path / "origin"),
        ):
            with pytest.raises(UsageError, match="twice"):
                call()
        with pytest.raises(CheckpointError, match="cannot be read"):
            writer.copy_file("x", tmp_path / "absent")
        writer.write(weights())
    found = listing(tmp_path / "out")
    assert found["text.json"] == "ä\n".encode()
    assert (found["code/model.py"], found["code/bytes"]) == (b"pass", b"\x00\r\n")


def write_half(directory: Path) -> ArtifactWriter:
    """Half of the tensors, and a file beside them, as an interrupted run leaves them."""
    writer = ArtifactWriter(directory, specs_of(weights()), max_shard_bytes=300, place=directory)
    writer.write(dict(list(weights().items())[:3]))
    writer.add_file("config.json", "half")
    return writer


def test_a_writer_goes_on_with_the_shards_of_another(tmp_path: Path) -> None:
    names = write_half(tmp_path / "out").written
    assert names == list(weights())[:3]

    writer = ArtifactWriter(tmp_path / "out", specs_of(weights()), max_shard_bytes=300, place=tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    writer.resume(names)
    with pytest.raises(CheckpointError, match="written already"):
        writer.write({names[0]: weights()[names[0]]})
    writer.write(dict(list(weights().items())[3:]))
    writer.seal()
    found = load(tmp_path / "out")
    assert all(same(found[name], tensor) for name, tensor in weights().items())


def test_a_writer_of_another_plan_takes_nothing_over(tmp_path: Path) -> None:
    names = write_half(tmp_path / "out").written
    writer = ArtifactWriter(tmp_path / "out", specs_of(weights()), max_shard_bytes=1000, place=tmp_path / "out")
    with pytest.raises(CheckpointError, match="interrupted run"):
        writer.resume(names)
    with pytest.raises(CheckpointError, match="`ghost`"):
        writer.resume(["ghost"])


def test_a_shard_that_is_gone_is_not_believed(tmp_path: Path) -> None:
    writer = write_half(tmp_path / "out")
    (tmp_path / "out" / writer.shards[0].file).unlink()
    again = ArtifactWriter(tmp_path / "out", specs_of(weights()), max_shard_bytes=300, place=tmp_path / "out")
    with pytest.raises(CheckpointError, match="interrupted run"):
        again.resume(writer.written)
