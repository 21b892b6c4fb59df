"""Find the weight files of a checkpoint directory and check them against their index. Reads headers only."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from quantkit.checkpoint.header import MAX_HEADER_BYTES, Header, TensorInfo, parse_json_object, read_header
from quantkit.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


def require_directory(path: Path) -> None:
    """Raise CheckpointError, saying what is there instead, unless `path` is a directory that is not empty."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise CheckpointError(
                f"`{path}` is a GGUF file; quantkit reads Hugging Face directories with safetensors weights",
                "pass the directory of the original 16-bit model",
            )
        raise CheckpointError(f"`{path}` is a file, not a checkpoint directory", f"pass `{path.parent}`")
    if not path.is_dir():
        raise CheckpointError(f"`{path}` is no directory", "check the spelling")
    try:
        empty = not any(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}", "check its permissions") from error
    if empty:
        raise CheckpointError(f"`{path}` is an empty directory", "check whether the download finished")


def read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: naming the file, when it is missing, unreadable, too big or holds something else.
    """
    return parse_json_object(read_small(path), path.name)


def read_small(path: Path) -> bytes:
    """Return the content of a file that is no weight file. Raises CheckpointError, naming it."""
    if not path.is_file():
        raise CheckpointError(f"`{path.parent}` has no `{path.name}`", "pass a complete Hugging Face model directory")
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"`{path.name}` is {path.stat().st_size:,} bytes big", "download the file again")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"`{path.name}` cannot be read: {error.strerror}", "check its permissions") from error


def read_headers(path: Path) -> tuple[Header, ...]:
    """Return the validated headers of every weight file of a checkpoint directory, sorted by file name.

    `model.safetensors` comes first, then the shards of an index, then whatever safetensors files there are.

    Raises:
        CheckpointError: no safetensors, a missing or broken file, an index that disagrees with its shards.
    """
    single, index = path / SINGLE_FILE, _index_file(path)
    if index is None:
        files = [SINGLE_FILE] if os.path.lexists(single) else _loose_files(path)
        headers = tuple(read_header(path / file) for file in files)
        _refuse_duplicates(headers)
        return headers
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    if single.exists() and files != [SINGLE_FILE]:
        raise CheckpointError(
            f"`{path}` has both `{SINGLE_FILE}` and an index, `{index.name}`, of other files, so engines disagree",
            "remove the set that is not meant",
        )
    _require_files(path, files, index.name)
    headers = tuple(read_header(path / file, file) for file in files)
    _refuse_duplicates(headers)
    _compare(weight_map, headers, index.name)
    return headers


def _index_file(path: Path) -> Path | None:
    """Return the index: the one with the usual name, or else the only one."""
    if (path / INDEX_FILE).exists():
        return path / INDEX_FILE
    others = [] if (path / SINGLE_FILE).exists() else sorted(path.glob("*.safetensors.index.json"))
    return others[0] if len(others) == 1 else None


def _loose_files(path: Path) -> list[str]:
    """Return every safetensors file of a directory that has neither `model.safetensors` nor an index."""
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise _no_safetensors(path)
    for match in filter(None, map(_SHARD.fullmatch, files)):
        count, width = int(match["count"]), len(match["number"])
        for number in range(1, min(count, 100_000) + 1):
            shard = f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors"
            if shard not in files:
                raise CheckpointError(f"`{path}` has `{match[0]}` but no `{shard}`", "download the missing file")
    return files


def _no_safetensors(path: Path) -> CheckpointError:
    names = sorted(file.name for file in path.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return CheckpointError(
            f"`{path}` has its weights in pickle files (`{pickles[0]}`), which can run code and are never loaded",
            f"convert them where you trust them: `AutoModelForCausalLM.from_pretrained({str(path)!r})"
            ".save_pretrained('NEW')`, then pass NEW",
        )
    if any(name.endswith(".gguf") for name in names):
        return CheckpointError(f"`{path}` holds GGUF files and no safetensors", "pass the original 16-bit model")
    if "snapshots" in names:
        return CheckpointError(f"`{path}` is a hub cache entry, not a checkpoint", f"pass `{path}/snapshots/COMMIT`")
    return CheckpointError(f"`{path}` holds no safetensors weights", "check whether the download finished")


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor name -> file name from an index, every file name proved to stay inside the directory."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{index.name}` has no `weight_map`", "download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise CheckpointError(
                f"`{index.name}` maps `{name}` to {file!a}, which is no safetensors file inside the directory",
                "download the file again from a source you trust",
            )
    return weight_map


def _stays_inside(file: str) -> bool:
    # A symlink is fine, the hub cache consists of them; the name itself must not lead out. A backslash or a
    # colon would on Windows.
    path = PurePosixPath(file)
    escapes = path.is_absolute() or ".." in path.parts or "\\" in file or ":" in file
    return not escapes and file.isprintable() and file.endswith(".safetensors")


def _require_files(path: Path, files: Iterable[str], index: str) -> None:
    missing = [file for file in files if not os.path.lexists(path / file)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"`{missing[0]}`{more} is missing, but `{index}` lists it", "download what is missing, or `git lfs pull`"
        )


def _refuse_duplicates(headers: Iterable[Header]) -> None:
    seen: dict[str, TensorInfo] = {}
    for info in (info for header in headers for info in header.tensors):
        first = seen.setdefault(info.name, info)
        if first is not info:
            raise CheckpointError(
                f"`{info.name}` is in both `{first.file}` and `{info.file}`", "remove the set that is not meant"
            )


def _compare(weight_map: dict[str, str], headers: Iterable[Header], index: str) -> None:
    """Raise CheckpointError unless index and shards hold the same tensors in the same files."""
    stored = {info.name: info.file for header in headers for info in header.tensors}
    hint = "the index belongs to other files: download both again"
    for name, file in weight_map.items():
        if stored.get(name) != file:
            where = f"it is in `{stored[name]}`" if name in stored else "no file has it"
            raise CheckpointError(f"`{index}` says `{name}` is in `{file}`, but {where}", hint)
    extra = stored.keys() - weight_map.keys()
    if extra:
        name = min(extra)
        count = Counter(stored[name] for name in extra)[stored[name]]
        more = f" and {count - 1} more" if count > 1 else ""
        raise CheckpointError(f"`{name}`{more} in `{stored[name]}` is not listed in `{index}`", hint)
