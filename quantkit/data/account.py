"""The account of a draw of token rows: what was read, used, cut and left out, with line numbers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from quantkit.data.corpus import Corpus

LINES_SHOWN = 20


@dataclass(slots=True)
class Draw:
    """Rows chosen from a corpus, in the order of use.

    Attributes:
        rows: token numbers, at least 2 in each row.
        available: rows there were to choose from: documents, or windows of running text.
        truncated: (line, reason) of the rows that were cut.
        dropped: (line, reason) of the documents that gave no row.
    """

    rows: list[list[int]] = field(default_factory=list)
    available: int = 0
    truncated: list[tuple[int, str]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)


def report_of(corpus: Corpus, draw: Draw) -> dict[str, Any]:
    """Count what was read, used and left out, as JSON values."""
    lengths = [len(row) for row in draw.rows]
    digest = hashlib.sha256()
    for row in draw.rows:
        digest.update(b"".join(token.to_bytes(4, "little") for token in (len(row), *row)))
    return {
        "source": corpus.source,
        "kind": "windows" if corpus.stream else "rows",
        "rows_read": corpus.rows,
        "usable": draw.available,
        "bad": _tally(corpus.bad),
        "empty": _tally((line, "empty") for line in corpus.empty),
        "truncated": _tally(draw.truncated),
        "dropped": _tally(draw.dropped),
        "rows_used": len(lengths),
        "tokens": sum(lengths),
        "tokens_min": min(lengths),
        "tokens_median": median_low(lengths),
        "tokens_max": max(lengths),
        "partial": corpus.partial,
        "digest": corpus.digest,
        "tokens_digest": digest.hexdigest(),
    }


def _tally(faults: Iterable[tuple[int, str]]) -> dict[str, Any]:
    faults = sorted(faults)
    reasons = dict(sorted(Counter(reason for _, reason in faults).items()))
    return {"count": len(faults), "lines": [line for line, _ in faults[:LINES_SHOWN]], "reasons": reasons}


def notes_of(corpus: Corpus, draw: Draw, report: dict[str, Any]) -> list[str]:
    """Say what a user did not ask for: fewer rows, or a source that was not read to its end."""
    notes = []
    if len(draw.rows) < report["samples"]:
        asked = f"{report['samples']} rows of {report['seq_len']} tokens were asked for"
        notes.append(f"{asked}; `{corpus.source}` gives {len(draw.rows)} rows, {report['tokens']} tokens in all")
    if corpus.partial and not corpus.ranked:
        held = sum(document.size for document in corpus.documents)
        notes.append(f"only the first {corpus.rows} rows of `{corpus.source}` were read, {held} characters")
    return notes
