"""What a report is made of: the record of a run, what was measured, and the judgement; written as report.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.locate import read_json_object
from quantkit.errors import CheckpointError
from quantkit.eval.compare import Divergence
from quantkit.report.budgets import Judgement

REPORT_VERSION = 1
REPORT_JSON, REPORT_HTML, RECORD_FILE = "report.json", "report.html", "quantkit.json"
_BLOCK = re.compile(r"\.(\d+)\.")
# parts of a record that a report has no use for, and that grow with the model
_LEFT_OUT = ("folds", "kv_cache")


@dataclass(frozen=True, slots=True)
class Result:
    """One artifact with its proof. All values are those of JSON.

    Attributes:
        name: of the artifact.
        record: its quantkit.json.
        measured: as `Divergence.to_json` has it; empty where nothing was measured.
        bytes_by_kind: stored bytes of codes, scales, zero points and everything else.
        judged: as `Judgement.to_json` has it.
        notes: sentences that a reader must know.
    """

    name: str
    record: Mapping[str, Any]
    measured: Mapping[str, Any] = field(default_factory=dict)
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    judged: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        record: Mapping[str, Any],
        found: Divergence | None,
        bytes_by_kind: Mapping[str, int],
        judged: Sequence[Judgement] = (),
        notes: Sequence[str] = (),
    ) -> Result:
        """Bring together what a run and an evaluation found."""
        kept = {key: value for key, value in record.items() if key not in _LEFT_OUT}
        measured = found.to_json() if found else {}
        return cls(name, kept, measured, bytes_by_kind, tuple(each.to_json() for each in judged), tuple(notes))

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read the report.json of an artifact; where there is none, its quantkit.json.

        Raises:
            CheckpointError: it has neither, or one that cannot be read.
        """
        if (path / REPORT_JSON).is_file():
            value: Mapping[str, Any] = read_json_object(path / REPORT_JSON)
            if value.get("report_version") != REPORT_VERSION or not isinstance(value.get("record"), dict):
                raise CheckpointError(
                    f"`{path / REPORT_JSON}` is no report of version {REPORT_VERSION}", "quantize again"
                )
            return cls(
                str(value.get("name", path.name)),
                value["record"],
                value.get("measured") or {},
                value.get("bytes_by_kind") or {},
                tuple(value.get("judged") or ()),
                tuple(value.get("notes") or ()),
            )
        if (path / RECORD_FILE).is_file():
            record: Mapping[str, Any] = read_json_object(path / RECORD_FILE)
            kept = {key: value for key, value in record.items() if key not in _LEFT_OUT}
            return cls(path.name, kept, notes=("Its quality was not measured.",))
        raise CheckpointError(
            f"`{path}` has neither `{REPORT_JSON}` nor `{RECORD_FILE}`", "name a folder that `quantkit quantize` wrote"
        )

    def to_json(self) -> dict[str, Any]:
        """What is written as report.json."""
        return {
            "report_version": REPORT_VERSION,
            "name": self.name,
            "verdict": verdict(self),
            "judged": [dict(each) for each in self.judged],
            "notes": list(self.notes),
            "measured": dict(self.measured),
            "bytes_by_kind": dict(self.bytes_by_kind),
            "record": dict(self.record),
        }

    def evaluation(self) -> dict[str, Any]:
        """What was found, without the record."""
        return {key: value for key, value in self.to_json().items() if key not in ("report_version", "record")}

    @property
    def failed(self) -> bool:
        """Whether a limit was not kept."""
        return any(not each["met"] for each in self.judged)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the source's tensors, and of the artifact's."""
        before = self.measured.get("reference_bytes") or self.record.get("source", {}).get("bytes", 0)
        after = self.measured.get("bytes_on_disk") or self.record.get("output", {}).get("bytes", 0)
        return int(before), int(after)

    def blocks(self) -> list[tuple[int, float, float, str]]:
        """(block, mean output error, largest, the linear that has it) for every block with packed linears."""
        errors: dict[int, list[tuple[float, str]]] = {}
        for name, entry in self.record.get("linears", {}).items():
            if found := _BLOCK.search(name):
                errors.setdefault(int(found[1]), []).append((float(entry["error"]), name))
        return [
            (block, sum(error for error, _ in each) / len(each), *max(each)) for block, each in sorted(errors.items())
        ]


def verdict(result: Result) -> str:
    """The result in a sentence: the limits first, where there are some."""
    before, after = result.sizes
    smaller = f"{before / after:.1f} times smaller" if before and after else ""
    measured = result.measured
    if not measured:
        said = f"{smaller}; its quality was not measured" if smaller else "its quality was not measured"
    else:
        ratio = measured["perplexity_ratio"]
        change = "perplexity beyond any number" if ratio is None else f"perplexity {ratio - 1:+.2%}"
        said = (
            f"{smaller}, {change}, KL {measured['kl']['mean']:.3g} nats per token,"
            f" the same most likely token {measured['kl']['top1']:.1%} of the time"
        )
    if not result.judged:
        return f"{said[:1].upper()}{said[1:]}; no budget was set."
    if missed := [each["said"] for each in result.judged if not each["met"]]:
        return f"Over budget: {'; '.join(missed)}. {said[:1].upper()}{said[1:]}."
    return f"Within budget: {'; '.join(each['said'] for each in result.judged)}. {said[:1].upper()}{said[1:]}."
