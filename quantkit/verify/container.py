"""The first look: weight files, index and config.json, before any tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.header import read_header
from quantkit.checkpoint.locate import read_headers, read_json_object, require_directory
from quantkit.checkpoint.reader import CONFIG_FILE
from quantkit.errors import CheckpointError
from quantkit.verify.verdict import Check

_INDEX = "*.safetensors.index.json"
_AGAIN = "copy or download it again; a run that was interrupted leaves no folder"
# what tools and versions write differently, and what a quantized model has besides
_FREE_KEYS = ("quantization_config", "transformers_version", "_name_or_path", "torch_dtype", "dtype")


def require_checkpoint(path: Path) -> None:
    """Refuse what is no checkpoint at all.

    Raises:
        CheckpointError: no directory, or one without safetensors.
    """
    require_directory(path)
    if any(path.glob("*.safetensors")) or any(path.glob(_INDEX)):
        return
    if inside := sorted(config.parent for config in path.glob(f"*/{CONFIG_FILE}")):
        listed = ", ".join(f"`{each}`" for each in inside)
        raise CheckpointError(f"`{path}` holds several artifacts, one a format", f"verify one of {listed}")
    read_headers(path)  # which says what is there instead


def look_at_headers(path: Path, headers: Check, index: Check) -> None:
    """Check every weight file by itself, then all of them against their index."""
    files = sorted(file.name for file in path.glob("*.safetensors"))
    for file in files:
        headers.looked += 1
        try:
            read_header(path / file)
        except CheckpointError as error:
            headers.fail(file, error.message, error.hint)
    if headers.failures:
        index.note = "not reached: a weight file is broken"
        return
    indices = sorted(path.glob(_INDEX))
    name = indices[0].name if indices else path.name
    try:
        read = read_headers(path)
    except CheckpointError as error:
        index.fail(name, error.message, error.hint or _AGAIN)
        return
    for stray in set(files) - {header.file for header in read}:
        index.fail(stray, "lies beside the weights and is none of them; some engines load it", "remove it")
    if not indices:
        index.note = "one file needs no index"
        return
    infos = [info for header in read for info in header.tensors]
    index.looked = len(infos)
    metadata = read_json_object(indices[0]).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(info.nbytes for info in infos)
    if said is not None and said != size:
        index.fail(name, f"`total_size` is {said}, and the tensors take {size:,} bytes", _AGAIN)


def look_at_config(config: Mapping[str, Any], reference: Mapping[str, Any] | None, check: Check) -> None:
    """Check that config.json describes the model of the source."""
    check.looked = len(config)
    if reference is None:
        return
    for key in sorted((config.keys() | reference.keys()) - set(_FREE_KEYS)):
        if (mine := config.get(key)) != (theirs := reference.get(key)):
            check.fail(
                CONFIG_FILE,
                f"`{key}` is {mine!a:.60}, and the source has {theirs!a:.60}",
                "take config.json of the source and add `quantization_config`; or compare with the right source",
            )
