"""From what a user calls a model to a local directory. The Hugging Face Hub client is imported only when needed."""

from __future__ import annotations

import difflib
import errno
import os
import re
from pathlib import Path

from quantkit.errors import CheckpointError, QuantkitError, ResourceError, UsageError
from quantkit.events import Emit, Note, ignore

# LICENSE and README travel with the artifact, so they are fetched too
ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.md", "LICENSE*")
IGNORE_PATTERNS = ("original/*", "consolidated*", "onnx/*")  # the same weights a second time
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


def resolve_model(model: str, *, revision: str | None = None, emit: Emit = ignore) -> Path:
    """Return the directory of a model: the local one of that name, or a snapshot from the Hugging Face Hub.

    A local file is returned as it is, too: `Checkpoint.open` explains what is wrong with it.

    Args:
        model: a path, or an id `org/name`.
        revision: branch, tag or commit on the hub.

    Raises:
        UsageError: neither exists, or the hub denies access.
        CheckpointError: the snapshot has no safetensors.
        ResourceError: the hub cannot be reached, or the disk refuses the download.
    """
    # os.path, since pathlib raises for an unknown ~user and, in some versions, for a name that is too long
    path = Path(os.path.expanduser(model))
    if model and os.path.exists(path):
        if revision is not None:
            raise UsageError(f"`{model}` is local and has no revision `{revision}`", "leave out `--revision`")
        return path
    if not _HUB_ID.fullmatch(model) or path.suffix in (".gguf", ".safetensors"):
        raise UsageError(f"`{model}` is neither a directory here nor an id `org/name`", _suggestion(path))
    emit(Note(f"fetching `{model}` from the Hugging Face Hub; files in its cache are used as they are"))
    snapshot = _download(model, revision)
    if not any(snapshot.rglob("*.safetensors")):
        raise CheckpointError(
            f"`{model}` has no safetensors weights on the Hugging Face Hub",
            "choose a repository or `--revision` that has; pickles are never loaded",
        )
    return snapshot


def _suggestion(path: Path) -> str:
    close = _near(path)
    if close:
        return f"did you mean {' or '.join(f'`{near}`' for near in close)}?"
    return "pass a directory with config.json and safetensors, or the full id of a model on the Hugging Face Hub"


def _near(path: Path) -> list[Path]:
    """Return directories named much like the first part of a path that does not exist."""
    missing = next((part for part in (*reversed(path.parents), path) if not os.path.exists(part)), path)
    try:
        names = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()]
    except (OSError, ValueError):
        return []
    return [missing.parent / name for name in difflib.get_close_matches(missing.name, names, n=3, cutoff=0.5)]


def _download(model: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UsageError(f"`{model}` needs the package huggingface_hub", "install it, or pass a directory") from error
    # The client raises OSErrors, errors of its own, and those of its HTTP library, which differs between versions;
    # the base of its own HTTP error is the base of that library's. RuntimeError comes from its transfer extension.
    http_error = errors.HfHubHTTPError.__bases__[0]
    own = [
        getattr(errors, name, None) for name in ("EntryNotFoundError", "RevisionResolutionError", "XetDownloadError")
    ]
    expected = (OSError, ValueError, RuntimeError, http_error, *(kind for kind in own if kind is not None))
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=list(ALLOW_PATTERNS), ignore_patterns=list(IGNORE_PATTERNS)
            )
        )
    except expected as error:
        raise _explain(model, revision, error) from error


def _explain(model: str, revision: str | None, error: Exception) -> QuantkitError:
    """Turn what the hub client raised into one error that names the id, the cause and the way without a network."""
    from huggingface_hub import errors, is_offline_mode

    near = _near(Path(model))
    local = f"or pass `{near[0]}`, which is here" if near else "or download it elsewhere and pass the directory"
    at = f" at revision `{revision}`" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"`{model}` is gated and this account has no access",
            f"accept its terms at https://huggingface.co/{model} and run `hf auth login`, {local}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"`{model}` has no revision `{revision or 'main'}`", f"check `--revision`, {local}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return UsageError(
            f"`{model}` is not on the Hugging Face Hub, or is private",
            f"check the spelling, run `hf auth login` if it is private, {local}",
        )
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"`{model}` is neither a directory here nor a valid id", "pass a directory or `org/name`")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return ResourceError(
            f"`{model}` cannot be stored in the Hugging Face cache: {error.strerror}",
            "free space there, or set HF_HOME to a directory on another disk",
        )
    if is_offline_mode():
        return ResourceError(
            f"`{model}`{at} is not complete in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch it",
            f"unset HF_HUB_OFFLINE, {local}",
        )
    cause = f"HTTP status {status}" if status else _first_line(error)
    return ResourceError(
        f"`{model}`{at} cannot be fetched from the Hugging Face Hub: {cause}", f"check the network, {local}"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
