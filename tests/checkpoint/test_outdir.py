"""An artifact is there in full or not at all, and nothing else is ever lost for it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.output import OutputDirectory
from quantkit.errors import CheckpointError, Interrupted, ResourceError, UsageError

from .fabricate import listing, model_dir, same, weights
from .written import load, specs_of, write_model, writing

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, CheckpointError, ResourceError])
def test_leaving_without_commit_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), writing(tmp_path / "new" / "parent" / "out", specs_of(weights()), 300) as writer:
        writer.write(weights())
        writer.add_file("config.json", "{}")
        raise error("x")
    with OutputDirectory(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, UsageError, ResourceError, Interrupted])
def test_what_is_worth_it_is_kept_where_another_try_may_help(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), OutputDirectory(tmp_path / "out") as output:
        (output.content / "x").touch()
        output.keep = True
        raise error("x")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        ".out.partial",
        ".out.partial/content",
        ".out.partial/content/x",
    ]

    with OutputDirectory(tmp_path / "out") as output:
        assert (output.content / "x").exists()
        output.commit()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/x"]


def test_what_would_fail_again_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError), OutputDirectory(tmp_path / "out") as output:
        output.keep = True
        raise CheckpointError("the source is damaged")
    assert list(tmp_path.iterdir()) == []


def test_parents_are_created(tmp_path: Path) -> None:
    assert load(write_model(tmp_path / "new" / "parent" / "out", weights())).keys() == weights().keys()


def test_existing_output_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", weights())
    before = listing(tmp_path)
    with pytest.raises(UsageError, match="not empty") as caught:
        write_model(out, weights(1))
    assert "--overwrite" in caught.value.hint
    (tmp_path / "file").touch()
    for target in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UsageError, match="is a file"):
            write_model(target, weights(), overwrite=True)
    (tmp_path / "file").unlink()
    assert listing(tmp_path) == before


def test_empty_output_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert load(write_model(tmp_path / "out", weights())).keys() == weights().keys()


def test_overwrite_replaces_everything(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", weights(), shard=300)
    (out / "stale.txt").touch()
    write_model(out, weights(1), overwrite=True)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert all(same(tensor, weights(1)[name]) for name, tensor in load(out).items())
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_follows_a_symlink(tmp_path: Path) -> None:
    real = write_model(tmp_path / "real", weights())
    (tmp_path / "out").symlink_to(real)
    write_model(tmp_path / "out", weights(1), overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert same(load(real)["model.norm.weight"], weights(1)["model.norm.weight"])


def test_overwrite_never_takes_a_directory_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        write_model(tmp_path / "home", weights(), overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_overwrite_never_takes_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_model(tmp_path / "out", weights())
    monkeypatch.chdir(out)
    with pytest.raises(UsageError, match="directory you are in"):
        write_model(Path("."), weights(), overwrite=True)


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_overwrite_restores_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    """The first rename moves the old directory aside, the second brings in the new one; the third puts it back."""
    out = write_model(tmp_path / "out", weights())
    before = listing(tmp_path)
    rename, calls = Path.rename, []

    def failing_rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise error
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises((ResourceError, KeyboardInterrupt)):
        patch.setattr(Path, "rename", failing_rename)
        write_model(out, weights(1), overwrite=True)
    assert listing(tmp_path) == before
    assert list(tmp_path.iterdir()) == [out]


def test_interrupt_after_the_last_rename_keeps_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_model(tmp_path / "out", weights())
    rename, calls = Path.rename, []

    def interrupted_rename(self: Path, target: Path) -> Path:
        rename(self, target)
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return self

    monkeypatch.setattr(Path, "rename", interrupted_rename)
    with pytest.raises(KeyboardInterrupt):
        write_model(out, weights(1), overwrite=True)
    assert same(load(out)["model.embed.weight"], weights(1)["model.embed.weight"])
    assert list(tmp_path.iterdir()) == [out]


def test_failure_before_commit_keeps_the_old_one(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", weights())
    before = listing(tmp_path)
    with (
        pytest.raises(CheckpointError, match="not written"),
        writing(out, specs_of(weights()), 300, overwrite=True) as writer,
    ):
        writer.write({"model.norm.weight": torch.zeros(8)})
    assert listing(tmp_path) == before


def test_output_filled_by_somebody_else_meanwhile(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="meanwhile"),
        writing(tmp_path / "out", specs_of(weights()), 300) as writer,
    ):
        writer.write(weights())
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.mark.parametrize(("out", "words"), [("source", "itself"), ("source/out", "inside"), ("", "contains")])
def test_source_is_never_the_output(tmp_path: Path, out: str, words: str) -> None:
    source = model_dir(tmp_path / "a" / "source", weights())
    (tmp_path / "a" / "config.json").touch()
    before = listing(tmp_path)
    with pytest.raises(UsageError, match=words):
        write_model(tmp_path / "a" / out, weights(), overwrite=True, source=source)
    assert listing(tmp_path) == before


def test_full_disk_is_found_before_anything_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match=r"needs 67\.1 MB, but .* has 50\.0 MB free") as caught:
        write_model(tmp_path / "new" / "out", weights())
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


REFUSALS = [
    (errno.ENOSPC, "disk is full"),
    (errno.EDQUOT, "quota"),
    (errno.EFBIG, "file size limit"),
    (errno.EACCES, "permission denied"),
    (errno.EROFS, "read-only"),
    (errno.EIO, "Input/output error"),
]


@pytest.mark.parametrize(("number", "words"), REFUSALS)
@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_refusal_of_the_disk_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, call: str
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ResourceError, match=words) as caught:
        write_model(tmp_path / "out", weights())
    assert caught.value.hint and "`" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_disk_without_fallocate_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert load(write_model(tmp_path / "out", weights())).keys() == weights().keys()


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    prelude = """
import os, resource, signal, sys, torch
from pathlib import Path
from checkpoint.written import TensorSpec, writing
from quantkit.errors import QuantkitError
specs = [TensorSpec(f"w{n}", "F32", (1024,)) for n in range(8)]
tensors = {spec.name: torch.ones(spec.shape) for spec in specs}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
"""
    command = [sys.executable, "-c", prelude + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY / "tests", check=False)


def test_file_size_limit_of_the_process(tmp_path: Path) -> None:
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    with writing(Path(sys.argv[1]), specs) as writer:
        writer.write(tensors)
except QuantkitError as error:
    print(error.message, error.exit_code)
"""
    result = run(script, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "file size limit" in result.stdout and result.stdout.strip().endswith("3")
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit_met_by_a_sidecar(tmp_path: Path) -> None:
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
try:
    with writing(Path(sys.argv[1]), specs) as writer:
        writer.write(tensors)
        writer.add_file("tokenizer.json", b"x" * 50_000)
except QuantkitError as error:
    print(error.message, error.exit_code)
"""
    assert "file size limit" in run(script, tmp_path / "out").stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    script = """
with writing(Path(sys.argv[1]), specs, 5000) as writer:
    writer.write({"w0": tensors["w0"]})
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
"""
    assert run(script, tmp_path / "out").returncode == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    script = """
with writing(Path(sys.argv[1]), specs, 5000) as writer:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(script, tmp_path / "out").returncode == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == [".out.partial"]
    assert load(write_model(tmp_path / "out", weights())).keys() == weights().keys()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_living_run_has_its_place_to_itself(tmp_path: Path) -> None:
    with writing(tmp_path / "out", specs_of(weights()), 300) as living:
        before = listing(tmp_path)
        with pytest.raises(UsageError, match="another run is writing"):
            write_model(tmp_path / "out", weights(1))
        assert listing(tmp_path) == before
        living.write(weights())
    assert same(load(tmp_path / "out")["model.norm.weight"], weights()["model.norm.weight"])


@pytest.mark.parametrize("moment", [1, 2])
def test_a_replacement_that_was_killed_is_settled_by_the_next_run(tmp_path: Path, moment: int) -> None:
    """Killed after the first rename, the old directory comes back; after the second, the new one stays."""
    out = write_model(tmp_path / "out", weights())
    script = """
rename, calls = Path.rename, []
def killed(self, target):
    rename(self, target)
    calls.append(target)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
Path.rename = killed
with writing(Path(sys.argv[1]), specs, overwrite=True) as writer:
    writer.write(tensors)
"""
    assert run(script, out, moment).returncode == -signal.SIGKILL
    assert {file.name for file in tmp_path.iterdir()} - {"out"} == {".out.partial", ".out.replaced"}

    expected = pytest.raises(UsageError, match="not empty") if moment == 1 else pytest.raises(ValueError)
    with expected, OutputDirectory(out, overwrite=moment == 2) as output:
        assert list(output.content.iterdir()) == []
        raise ValueError

    assert set(load(out)) == (set(weights()) if moment == 1 else {f"w{n}" for n in range(8)})
    assert not (tmp_path / ".out.replaced").exists()


def test_a_folder_of_models_is_replaced_as_one(tmp_path: Path) -> None:
    for name in ("awq", "gptq"):
        write_model(tmp_path / "out" / name, weights())
    with OutputDirectory(tmp_path / "out", overwrite=True) as output:
        for name in ("awq", "modelopt"):
            writer = output.writer(specs_of(weights(1)), 300, name)
            writer.write(weights(1))
            writer.seal()
        output.commit()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["awq", "modelopt"]

    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(UsageError, match="holds no model"), OutputDirectory(tmp_path / "out", overwrite=True):
        pass
