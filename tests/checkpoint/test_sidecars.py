"""Everything that is not a weight arrives byte for byte, whatever it contains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantkit.checkpoint.sidecars import copy_sidecars, sidecar_files
from quantkit.checkpoint.writer import TensorSpec
from quantkit.errors import CheckpointError, UsageError

from .fabricate import listing
from .written import writing

KEPT = {
    "tokenizer.json": b'{"version": "1.0",\r\n "a":   1}',
    "tokenizer.model": bytes(range(256)),
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "vocab.json": b"{}",
    "merges.txt": "#version: 0.2\nĠ t\n".encode(),
    "qwen.tiktoken": b"IQ== 0\n",
    "chat_template.jinja": b"{% for m in messages %}\r\n{{ m }}{% endfor %}\n\n",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "generation_config.json": b'{"temperature": 0.6, "do_sample": false, "_x": NaN,}',  # odd, and not even JSON
    "preprocessor_config.json": b"{}",
    "modeling_toy.py": b"import os  \n\tpass\n",
    "code/deep/layers.py": b"",
    "code/config.json": b"{}",
    "README.md": b"# model",
    "LICENSE": b"words",
    ".gitattributes": b"*.bin filter=lfs\n",
    "assets/picture.png": b"\x89PNG",
    "words.index.json": b"{}",
}
LEFT = [
    *("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json", "optimizer.pt"),
    *("a.pth", "b.ckpt", "c.GGUF", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "consolidated.00.pth"),
    *("consolidated.safetensors", "consolidated.index.json", "original/params.json", ".git/HEAD", ".cache/x/y.json"),
    *("__pycache__/a.pyc", "code/__pycache__/b.pyc", "code/adapter.safetensors"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    for name, content in KEPT.items() | {(name, b"weights") for name in LEFT}:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def test_exactly_the_sidecars_are_found(source: Path) -> None:
    assert [file.relative_to(source).as_posix() for file in sidecar_files(source)] == sorted(KEPT, key=Path)


def test_copy_to_a_directory_is_byte_identical(source: Path, tmp_path: Path) -> None:
    assert set(copy_sidecars(source, tmp_path / "copy")) == set(KEPT)
    assert listing(tmp_path / "copy") == KEPT


def test_copy_to_a_writer_is_byte_identical(source: Path, tmp_path: Path) -> None:
    spec = TensorSpec("w", "F32", (0,))
    with pytest.raises(UsageError, match=r"README\.md"), writing(tmp_path / "out", [spec], source=source) as writer:
        writer.add_file("README.md", "ours")
        copy_sidecars(source, writer)
    with writing(tmp_path / "out", [spec], source=source) as writer:
        copied = copy_sidecars(source, writer, skip=["README.md"])
        writer.add_file("README.md", "ours")
        writer._pending.clear()
    assert "README.md" not in copied
    found = listing(tmp_path / "out")
    del found["model.safetensors"]
    assert found == KEPT | {"README.md": b"ours"}


def test_hub_cache_symlinks_become_files(source: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    for number, name in enumerate(listing(source)):
        (source / name).rename(blobs / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    copy_sidecars(snapshot, tmp_path / "copy")
    assert listing(tmp_path / "copy") == KEPT
    assert not any(file.is_symlink() for file in (tmp_path / "copy").rglob("*"))


def test_linked_directories_are_taken_once_and_loops_end(tmp_path: Path) -> None:
    path = tmp_path / "source"
    (path / "code").mkdir(parents=True)
    (path / "code" / "a.py").touch()
    (path / "code" / "loop").symlink_to(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.py").touch()
    (path / "linked").symlink_to(elsewhere)
    assert [file.relative_to(path).as_posix() for file in sidecar_files(path)] == ["code/a.py", "linked/b.py"]


def test_broken_sidecars_are_named(source: Path) -> None:
    (source / "vocab.txt").symlink_to("absent")
    with pytest.raises(CheckpointError, match=r"`vocab\.txt` is a symlink to a missing file"):
        sidecar_files(source)
    (source / "vocab.txt").unlink()
    (source / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(CheckpointError, match=r"`tokenizer\.json` is a Git LFS pointer"):
        sidecar_files(source)
