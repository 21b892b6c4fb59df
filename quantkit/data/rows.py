"""Rows of a calibration source: what a line may hold, and readers for local files.

No tokenizer and no network: a row becomes a Document, or a reason with its line number, never a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError

FIELDS = ("text", "messages", "prompt", "completion", "input_ids")
NO_FIELD = "no `text`, `messages`, `prompt` and `completion`, or `input_ids`"
NOT_UTF8 = "not UTF-8"
BINARY = "a NUL byte"
BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Document:
    """One usable piece of calibration data in exactly one form.

    Attributes:
        line: 1-based line or row number in its source.
        text: plain text.
        messages: a conversation; each message holds `role` and `content`.
        prompt: read together with `completion`, as one text.
        input_ids: tokens as given, at least one, none negative.
    """

    line: int
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    completion: str | None = None
    input_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("a document holds prompt and completion together")
        if sum(form is not None for form in (self.text, self.messages, self.prompt, self.input_ids)) != 1:
            raise ValueError("a document holds exactly one of text, messages, prompt and completion, input_ids")

    @property
    def content(self) -> Any:
        """What the document holds, as a value that JSON can write."""
        if self.prompt is not None:
            return [self.prompt, self.completion]
        return next(form for form in (self.text, self.messages, self.input_ids) if form is not None)

    @property
    def size(self) -> int:
        """Characters, or an estimate of them where the row holds tokens."""
        if self.text is not None:
            return len(self.text)
        if self.messages is not None:
            return sum(len(str(message.get("content") or "")) for message in self.messages)
        if self.prompt is not None:
            return len(self.prompt) + len(self.completion or "")
        return 4 * len(self.input_ids or ())


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that cannot be used, and why. Reasons repeat, so that they can be counted."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Empty:
    """A row without content."""

    line: int


Row = Document | Bad | Empty


@dataclass(frozen=True, slots=True)
class Harvest:
    """Everything read from one source.

    Attributes:
        rows: rows read, usable or not.
        partial: reading stopped at the character limit; the source holds more.
    """

    documents: tuple[Document, ...]
    bad: tuple[tuple[int, str], ...]
    empty: tuple[int, ...]
    rows: int
    partial: bool


def collect(rows: Iterable[Row], characters: int) -> Harvest:
    """Read rows until their documents hold `characters` characters."""
    documents: list[Document] = []
    bad: list[tuple[int, str]] = []
    empty: list[int] = []
    count = size = 0
    partial = False
    for row in rows:
        if size >= characters:
            partial = True
            break
        count += 1
        if isinstance(row, Document):
            documents.append(row)
            size += row.size
        elif isinstance(row, Bad):
            bad.append((row.line, row.reason))
        else:
            empty.append(row.line)
    return Harvest(tuple(documents), tuple(bad), tuple(empty), count, partial)


def parse_row(row: object, line: int, column: str | None = None) -> Row:
    """Turn one decoded row into a document or into the reason why it is none.

    Args:
        row: what JSON, parquet or the hub gave.
        line: 1-based number of the row.
        column: field that holds the content; None looks for the usual ones. Null counts as absent where another
            field is present, because tables fill the fields of other forms with null.
    """
    if row is None:
        return Bad(line, "null")
    if not isinstance(row, dict):
        return Bad(line, f"{_kind(row)}, not an object")
    if column is not None:
        return _any_form(row[column], line, column) if column in row else Bad(line, f"no field `{column}`")
    name = next((field for field in FIELDS if row.get(field) is not None), None)
    if name is None:
        named = next((field for field in FIELDS if field in row), None)
        return Bad(line, f"`{named}` is null" if named else NO_FIELD)
    if name in ("prompt", "completion"):
        return _pair(row, line)
    return {"text": _text, "messages": _messages, "input_ids": _input_ids}[name](row[name], line, name)


def _any_form(value: object, line: int, name: str) -> Row:
    """Read a column the user named: text, messages or tokens, told apart by their type."""
    if value is None:
        return Bad(line, f"`{name}` is null")
    if isinstance(value, list) and (not value or isinstance(value[0], dict)):
        return _messages(value, line, name)
    return _input_ids(value, line, name) if isinstance(value, list) else _text(value, line, name)


def _text(value: object, line: int, name: str) -> Row:
    if not isinstance(value, str):
        return Bad(line, f"`{name}` is {_kind(value)}, not a string")
    if not value.strip():
        return Empty(line)
    return Document(line, text=value) if _encodable(value) else Bad(line, f"`{name}` holds an unpaired surrogate")


def _pair(row: dict[Any, Any], line: int) -> Row:
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        value = row.get(name)
        if value is None:
            return Bad(line, f"`{other}` without `{name}`")
        if not isinstance(value, str):
            return Bad(line, f"`{name}` is {_kind(value)}, not a string")
        if not _encodable(value):
            return Bad(line, f"`{name}` holds an unpaired surrogate")
    document = Document(line, prompt=row["prompt"], completion=row["completion"])
    return document if f"{row['prompt']}{row['completion']}".strip() else Empty(line)


def _messages(value: object, line: int, name: str) -> Row:
    if not isinstance(value, list):
        return Bad(line, f"`{name}` is {_kind(value)}, not a list")
    # tables give every message every key; a null one was never written
    kept = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else None for m in value]
    messages = [message for message in kept if message is not None]
    if len(messages) < len(kept):
        return Bad(line, f"`{name}` holds a message that is not an object")
    if any(not isinstance(message.get("role"), str) for message in messages):
        return Bad(line, f"`{name}` holds a message without `role`")
    if any(not isinstance(message.get("content", ""), str | list) for message in messages):
        return Bad(line, f"`{name}` holds a message whose `content` is neither a string nor a list")
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        return Empty(line)
    if not _encodable(json.dumps(messages, ensure_ascii=False, default=str)):
        return Bad(line, f"`{name}` holds an unpaired surrogate")
    return Document(line, messages=tuple(messages))


def _input_ids(value: object, line: int, name: str) -> Row:
    if not isinstance(value, list):
        return Bad(line, f"`{name}` is {_kind(value)}, not a list")
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in value):
        return Bad(line, f"`{name}` holds something that is not a token number")
    return Document(line, input_ids=tuple(value)) if value else Empty(line)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list"}
    kinds |= {dict: "an object", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def read_jsonl(path: Path, column: str | None) -> Iterator[Row]:
    """Yield one row per line; a blank line counts as empty."""
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            yield _json_row(raw, line, column)


def _json_row(raw: bytes, line: int, column: str | None) -> Row:
    if not raw.strip():
        return Empty(line)
    try:
        return parse_row(json.loads(raw.decode("utf-8")), line, column)
    except UnicodeDecodeError:
        return Bad(line, NOT_UTF8)
    except (ValueError, RecursionError):  # ValueError: JSONDecodeError, and integers of thousands of digits
        return Bad(line, "bad JSON")


def read_parquet(path: Path, column: str | None) -> Iterator[Row]:
    """Yield the rows of a parquet file, `BATCH_ROWS` at a time and only the columns that matter.

    Raises:
        UsageError: the file is no parquet file, or has none of the columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            wanted = [name for name in ((column,) if column else FIELDS) if name in names]
            if not wanted:
                missing = f"no column `{column}`" if column else NO_FIELD
                hint = f"name the column that holds the text; it has {', '.join(names) or 'none'}"
                raise UsageError(f"`{path}` has {missing}", hint)
            first = 1
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                yield from (_parquet_row(batch.slice(i, 1), first + i, column) for i in range(batch.num_rows))
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"`{path}` cannot be read as parquet: {error}", "check that the file is complete") from error


def _parquet_row(row: Any, line: int, column: str | None) -> Row:
    try:
        return parse_row(row.to_pylist()[0], line, column)
    except UnicodeDecodeError:  # parquet does not check its strings
        return Bad(line, NOT_UTF8)


def read_text(path: Path, characters: int) -> Harvest:
    """Read a text file as one document, without the lines that are not text; newlines become `\\n`.

    Blank lines are part of the text. `rows` counts lines.
    """
    kept: list[str] = []
    bad: list[tuple[int, str]] = []
    line = size = 0
    partial = False
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if size >= characters:
                line, partial = line - 1, True
                break
            try:
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError:
                bad.append((line, NOT_UTF8))
                continue
            if "\0" in text:  # UTF-16 or a binary file; no tokenizer was trained on NUL
                bad.append((line, BINARY))
                continue
            kept.append(text.replace("\r\n", "\n").replace("\r", "\n"))
            size += len(text)
    whole = "".join(kept)
    documents = (Document(1, text=whole),) if whole.strip() else ()
    empty = () if documents or not kept else (1,)
    return Harvest(documents, tuple(bad), empty, line, partial)
