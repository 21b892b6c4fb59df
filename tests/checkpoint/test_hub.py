"""A model's name becomes a directory, or one error that says what to do. Nothing here touches the network."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from quantkit.checkpoint.hub import ALLOW_PATTERNS, resolve_model
from quantkit.errors import CheckpointError, QuantkitError, ResourceError, UsageError
from quantkit.events import Event, Note


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def refusal(model: str, **options: str) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        resolve_model(model, **options)  # type: ignore[arg-type]
    assert f"`{model}`" in caught.value.message
    return caught.value


def http_error(kind: type[Exception], status: int) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} for url: https://huggingface.co/api/models/org/name\nmore lines")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def test_local_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AssertionError("the hub was asked"))
    Path("org/name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/cwd") == tmp_path / "cwd"
    Path("model.gguf").touch()
    assert resolve_model("model.gguf") == Path("model.gguf")


def test_local_directory_has_no_revision() -> None:
    Path("org/name").mkdir(parents=True)
    assert "`v1`" in refusal("org/name", revision="v1").message


@pytest.mark.parametrize(
    "model",
    [
        "./lama-8b",
        "lama-8b",
        "models/deep/lama-8b",
        "/nowhere/at/all",
        "~no_such_user/x",
        "x" * 5000,
        "a\0b",
        "",
        "a/b.gguf",
    ],
)
def test_missing_path_is_not_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    fail_with(monkeypatch, AssertionError("the hub was asked"))
    assert isinstance(refusal(model), UsageError)


def test_missing_path_gets_a_suggestion() -> None:
    Path("models/llama-8b").mkdir(parents=True)
    assert "`models/llama-8b`" in refusal("./models/lama-8b").hint
    assert "`models`" in refusal("./model/llama-8b").hint
    assert "`models/llama-8b`" in refusal("models/lama-8b").hint  # reads like an id, and the hub is out of reach


def test_snapshot_is_downloaded_with_the_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    (tmp_path / "model.safetensors").touch()

    def snapshot_download(
        model: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((model, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    seen: list[Event] = []
    assert resolve_model("org/name", revision="v1", emit=seen.append) == tmp_path
    assert asked == [("org/name", "v1", list(ALLOW_PATTERNS))]
    assert isinstance(seen[0], Note) and "`org/name`" in seen[0].message


def test_snapshot_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(tmp_path))
    error = refusal("org/name")
    assert isinstance(error, CheckpointError) and "pickles" in error.hint


def test_cached_snapshot_works_offline(tmp_path: Path) -> None:
    """Through the real client, which is told to stay offline."""
    entry = tmp_path / "cache" / "models--org--name"
    commit = "a" * 40
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(commit)
    (entry / "snapshots" / commit).mkdir(parents=True)
    (entry / "snapshots" / commit / "model.safetensors").touch()
    assert resolve_model("org/name").resolve() == (entry / "snapshots" / commit).resolve()


def test_offline_without_a_cached_snapshot() -> None:
    """Through the real client, which is told to stay offline."""
    error = refusal("org/name")
    assert isinstance(error, ResourceError)
    assert "HF_HUB_OFFLINE" in error.message and "pass the directory" in error.hint


@pytest.mark.parametrize(
    ("kind", "status", "ours", "words"),
    [
        (errors.GatedRepoError, 403, UsageError, "gated"),
        (errors.RepositoryNotFoundError, 404, UsageError, "not on the Hugging Face Hub"),
        (errors.RevisionNotFoundError, 404, UsageError, "no revision `v1`"),
        (errors.HfHubHTTPError, 401, UsageError, "private"),
        (errors.HfHubHTTPError, 503, ResourceError, "HTTP status 503"),
        (errors.HfHubHTTPError.__bases__[0], 0, ResourceError, "cannot be fetched"),
    ],
)
def test_answers_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], status: int, ours: type[QuantkitError], words: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fail_with(monkeypatch, http_error(kind, status))
    error = refusal("org/name", revision="v1")
    assert type(error) is ours and words in error.message
    assert "pass the directory" in error.hint
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("raised", "ours", "words"),
    [
        (errors.LocalEntryNotFoundError("Got: ConnectError: name not known\nand more"), ResourceError, "ConnectError"),
        (ConnectionError("network unreachable"), ResourceError, "network unreachable"),
        (TimeoutError(), ResourceError, "TimeoutError"),
        (RuntimeError("transfer broke"), ResourceError, "transfer broke"),
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), ResourceError, "Permission denied"),
        (errors.HFValidationError("bad id"), UsageError, "valid id"),
    ],
)
def test_failures_of_network_and_disk(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, ours: type[QuantkitError], words: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fail_with(monkeypatch, raised)
    error = refusal("org/name")
    assert type(error) is ours and words in error.message and "\n" not in error.message
    assert error.hint
