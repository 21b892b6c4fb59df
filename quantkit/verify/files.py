"""Checks of the files beside the weights: digests, the copies of the config that engines read, the tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.locate import read_json_object
from quantkit.errors import CheckpointError
from quantkit.formats import reader_of
from quantkit.verify.subject import RECORD_FILE
from quantkit.verify.verdict import Check

# what turns text into tokens and back, and tokens into prompts
_TOKENIZER = (
    *("tokenizer.*", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.tiktoken", "*.model", "chat_template.*", "generation_config.json"),
)
_AGAIN = "copy the artifact again, or quantize again"


def look_at_files(path: Path, config: Mapping[str, Any], reference: Path | None, check: Check) -> dict[str, Any]:
    """Check every file that has something to be compared with; returns the record, {} where there is none to read."""
    record = _record(path, check)
    _look_at_digests(path, record, check)
    quantization = config.get("quantization_config")
    fmt = reader_of(quantization) if isinstance(quantization, dict) else None
    if fmt is not None and isinstance(quantization, dict):
        _look_at_copies(path, quantization, fmt.files, check)
    if reference is not None:
        _look_at_tokenizer(path, reference, check)
    if not check.looked and not check.failures:
        check.note = f"no `{RECORD_FILE}` with digests, and no source given"
    return record


def _record(path: Path, check: Check) -> dict[str, Any]:
    if not (path / RECORD_FILE).exists():
        return {}
    try:
        return read_json_object(path / RECORD_FILE)
    except CheckpointError as error:
        check.fail(RECORD_FILE, error.message, error.hint)
        return {}


def _look_at_digests(path: Path, record: Mapping[str, Any], check: Check) -> None:
    output = record.get("output")
    digests = output.get("sha256") if isinstance(output, dict) else None
    if not isinstance(digests, dict):
        return
    here = {file.name for file in path.glob("*.safetensors")}
    for file in sorted(here | digests.keys()):
        check.looked += 1
        if file not in here:
            check.fail(file, f"is missing, and `{RECORD_FILE}` lists it", _AGAIN)
        elif file not in digests:
            check.fail(file, f"is not listed in `{RECORD_FILE}`", _AGAIN)
        elif _sha256(path / file) != digests[file]:
            check.fail(file, f"has another sha256 than when it was written, by `{RECORD_FILE}`", _AGAIN)


def _look_at_copies(path: Path, quantization: Mapping[str, Any], files: Any, check: Check) -> None:
    """Compare the JSON files that readers of a format want with `quantization_config`."""
    try:
        expected: dict[str, dict[str, Any]] = files(quantization)
    except KeyError:  # another tool's config, without what ours is made of
        return
    for name, content in expected.items():
        check.looked += 1
        try:
            found = read_json_object(path / name)
        except CheckpointError as error:
            check.fail(name, error.message, "take it from where the artifact was written, or convert again")
            continue
        if differing := sorted(key for key in content if found.get(key) != content[key]):
            check.fail(
                name, f"disagrees with `quantization_config` of config.json in `{differing[0]}`", "convert it again"
            )


def _look_at_tokenizer(path: Path, reference: Path, check: Check) -> None:
    names = {file.name for pattern in _TOKENIZER for file in reference.glob(pattern) if file.is_file()}
    for name in sorted(names):
        check.looked += 1
        if not (path / name).is_file():
            check.fail(name, "of the source is missing", "copy it from the source")
        elif (path / name).read_bytes() != (reference / name).read_bytes():
            check.fail(name, "differs from the source's", "copy it from the source")


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
