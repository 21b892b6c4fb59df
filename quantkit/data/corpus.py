"""Where calibration and evaluation text comes from: built-in, local files, named recipes, the datasets hub.

Knows no tokenizer. The only file that may import `datasets`, and only when a hub source is named.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from quantkit.data.builtin import BUILTIN, HELDOUT, calibration_root, calibration_texts, heldout_texts
from quantkit.data.mix import Mix, Part, blend, mix_names, read_mix
from quantkit.data.rows import Bad, Document, Empty, Harvest, collect, parse_row, read_jsonl, read_parquet, read_text
from quantkit.errors import UsageError

__all__ = ["CHARACTERS", "Corpus", "Document", "by_reason", "load_corpus"]

CHARACTERS = 1 << 25  # about eight million tokens: far more than calibration uses, and little memory
JSONL = (".jsonl", ".ndjson", ".json-lines")
YAML = (".yaml", ".yml")
_PATH_SUFFIXES = (".txt", ".parquet", ".json", ".csv", ".tsv", ".md", ".gz", ".zst", ".arrow", *JSONL, *YAML)
ALTERNATIVES = f"name a local .txt, .jsonl or .parquet file, or `{BUILTIN}`, which needs no network"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to calibrate or evaluate on, and an account of what was read.

    Attributes:
        source: what the user named.
        stream: the documents, all text, are one running text to be cut into windows; otherwise each is a row.
        rows: rows (of a text file: lines) read, usable or not.
        bad: (line, reason) of the rows that cannot be used. In a mix the reason begins with the source's name.
        empty: lines of the rows without content.
        digest: sha256 over the documents' contents in order.
        partial: reading stopped at the character limit; the source holds more.
        ranked: the best documents come first; take only as many as are needed.
    """

    source: str
    documents: tuple[Document, ...]
    stream: bool
    rows: int
    bad: tuple[tuple[int, str], ...]
    empty: tuple[int, ...]
    digest: str
    partial: bool = False
    ranked: bool = False


def load_corpus(
    source: str, *, split: str | None = None, column: str | None = None, characters: int = CHARACTERS
) -> Corpus:
    """Read the documents of a source.

    Args:
        source: `builtin`, `builtin-heldout`, a recipe's name, a .txt, .jsonl, .parquet or recipe .yaml file, or a
            datasets hub id, `OWNER/NAME` or `OWNER/NAME:CONFIG`.
        split: split of a hub dataset; None reads `train`.
        column: field that holds the text, messages or tokens, in sources that have fields.
        characters: stop reading after that many.

    Raises:
        UsageError: the source does not exist, cannot be read, or holds nothing usable.
    """
    if not source.strip() or "\0" in source:
        raise UsageError(f"`{source!r}` names no calibration source", ALTERNATIVES)
    if source in mix_names():
        _reject_options(source, split=split, column=column)
        return _load_mix(source, read_mix(calibration_root() / f"{source}.yaml"), characters)
    path = Path(source).expanduser()
    if path.suffix.lower() in YAML and os.path.isfile(path):
        _reject_options(source, split=split, column=column)
        return _load_mix(source, read_mix(path), characters)
    return _load_single(source, split, column, characters)


def _load_single(source: str, split: str | None, column: str | None, characters: int) -> Corpus:
    if source in (BUILTIN, HELDOUT):
        _reject_options(source, split=split, column=column)
        texts = calibration_texts() if source == BUILTIN else heldout_texts()
        rows = (Document(line, text=text) for line, text in enumerate(texts, 1))
        return _corpus(source, collect(rows, characters), stream=True, ranked=source == BUILTIN)
    path = Path(source).expanduser()
    if os.path.exists(path):
        _reject_options(source, split=split)
        return _load_file(source, path, column, characters)
    if _looks_like_path(source):
        raise _missing_file(path)
    return _corpus(source, collect(_hub_rows(source, split or "train", column), characters), stream=False)


def _load_file(source: str, path: Path, column: str | None, characters: int) -> Corpus:
    if not os.path.isfile(path):
        raise UsageError(f"`{source}` is a folder", "name a .txt, .jsonl or .parquet file inside it")
    kind = path.suffix.lower()
    try:
        if kind == ".txt":
            _reject_options(source, column=column)
            return _corpus(source, read_text(path, characters), stream=True)
        if kind in JSONL:
            return _corpus(source, collect(read_jsonl(path, column), characters), stream=False)
        if kind == ".parquet":
            return _corpus(source, collect(read_parquet(path, column), characters), stream=False)
    except OSError as error:
        raise UsageError(
            f"`{source}` cannot be read: {error.strerror}", "check the file and its permissions"
        ) from error
    hint = "one JSON object per line in a .jsonl file" if kind == ".json" else "convert it to .txt, .jsonl or .parquet"
    raise UsageError(f"`{source}` has the unknown file type `{kind}`", hint)


def _load_mix(name: str, mix: Mix, characters: int) -> Corpus:
    total = sum(part.share or 1.0 for part in mix.parts)
    parts = [_load_part(part, mix, int(characters * (part.share or 1.0) / total)) for part in mix.parts]
    stream = mix.stream if mix.stream is not None else all(part.stream for part in parts)
    if not stream and (running := next((part.source for part in parts if part.stream), None)):
        raise UsageError(f"recipe `{name}` mixes running text (`{running}`) with rows", "add `stream: true` to it")
    if stream and (row := next((p.source for p in parts if any(d.text is None for d in p.documents)), None)):
        raise UsageError(f"recipe `{name}` streams `{row}`, which does not hold plain text", "remove `stream: true`")
    shares = [part.share for part in mix.parts if part.share is not None]
    documents = [part.documents for part in parts]
    harvest = Harvest(
        documents=blend(documents, shares) if shares else tuple(chain.from_iterable(documents)),
        bad=tuple((line, f"{part.source}: {reason}") for part in parts for line, reason in part.bad),
        empty=tuple(line for part in parts for line in part.empty),
        rows=sum(part.rows for part in parts),
        partial=any(part.partial for part in parts),
    )
    return _corpus(name, harvest, stream=stream)


def _load_part(part: Part, mix: Mix, characters: int) -> Corpus:
    """Load one source of a mix; a relative path is relative to the recipe. Mixes do not nest."""
    beside = mix.path.parent / Path(part.source).expanduser()
    is_path = _looks_like_path(part.source) or os.path.isfile(beside)
    source = str(beside) if is_path else part.source
    if source in mix_names() or Path(source).suffix.lower() in YAML:
        raise UsageError(f"recipe `{mix.path}` names the recipe `{part.source}`", "list that recipe's sources instead")
    return replace(_load_single(source, part.split, part.column, characters), source=part.source)


def _hub_rows(source: str, split: str, column: str | None) -> Iterator[Document | Bad | Empty]:
    """Stream a dataset from the hub; rows count from 1.

    Raises:
        UsageError: no network, no such dataset, configuration or split, or the stream broke.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    # the hub's bases are the errors of the HTTP client it uses, another one in every major version
    failures = (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError)
    name, _, config = source.partition(":")
    try:
        stream = datasets.load_dataset(name, config or None, split=split, streaming=True)
        for line, row in enumerate(stream, 1):
            yield parse_row(row, line, column)
    except (*failures, *HfHubHTTPError.__bases__) as error:
        known = get_close_matches(source, [BUILTIN, HELDOUT, *mix_names()], n=1)
        hint = f"did you mean `{known[0]}`? Otherwise {ALTERNATIVES}" if known else ALTERNATIVES
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"split `{split}` of `{source}` cannot be read from the hub: {cause}", hint) from error


def _corpus(source: str, harvest: Harvest, *, stream: bool, ranked: bool = False) -> Corpus:
    """Make a corpus of what was read, or say why there is none."""
    if not harvest.documents:
        faults = by_reason([*harvest.bad, *((line, "empty") for line in harvest.empty)])
        counts = "; ".join(f"{len(lines)} x {reason} ({_lines(lines)})" for reason, lines in faults.items())
        message = f"nothing usable in `{source}`: {harvest.rows} rows read" + (f"; {counts}" if counts else "")
        raise UsageError(message, "each line of a .jsonl file is an object with `text`, `messages` or `input_ids`")
    digest = _digest(harvest.documents)
    bad, empty, rows, partial = harvest.bad, harvest.empty, harvest.rows, harvest.partial
    return Corpus(source, harvest.documents, stream, rows, bad, empty, digest, partial, ranked)


def by_reason(faults: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Group lines by reason, in the order in which the reasons first appear."""
    groups: dict[str, list[int]] = defaultdict(list)
    for line, reason in faults:
        groups[reason].append(line)
    return dict(groups)


def _lines(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:5]))
    return f"line{'s' if len(lines) > 1 else ''} {shown}{', …' if len(lines) > 5 else ''}"


def _digest(documents: tuple[Document, ...]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(document.content, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _reject_options(source: str, **options: str | None) -> None:
    """Refuse an option that this source would ignore."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"`{source}` has no {name}, but `{value}` was asked for", f"leave out the {name}")


def _looks_like_path(source: str) -> bool:
    name = source.lower()
    deep = name.partition(":")[0].count("/") > 1  # a hub configuration after the colon may hold slashes
    return name.startswith((".", "/", "~")) or "\\" in name or deep or name.endswith(_PATH_SUFFIXES)


def _missing_file(path: Path) -> UsageError:
    folder = path.parent
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return UsageError(f"`{path}` does not exist: there is no folder `{folder}`", ALTERNATIVES)
    close = get_close_matches(path.name, names, n=3)
    hint = f"did you mean {' or '.join(f'`{folder / name}`' for name in close)}?" if close else ALTERNATIVES
    return UsageError(f"`{path}` does not exist", hint)
