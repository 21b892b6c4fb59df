"""What a look at an artifact found: checks, how much each looked at, and what is wrong. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# in the order of a verdict, with what each counts
CHECKS: dict[str, str] = {
    "headers": "files",  # every weight file is what its header says
    "index": "tensors",  # index and files name the same tensors
    "config": "settings",  # config.json can be read, and is the source's
    "names": "tensors",  # the model's parameters are there, and no weight that nothing asks for
    "packed": "linears",  # what quantization_config says is packed is, and something is
    "shapes": "tensors",  # as the model and the scheme ask for
    "dtypes": "tensors",  # as the format and the model ask for
    "codes": "linears",  # can be unpacked, and no row holds one code only
    "scales": "scales",  # finite and positive
    "zero-points": "zero points",  # in range; in the middle where the scheme is symmetric
    "siblings": "groups",  # linears that engines fuse have one scheme
    "weights": "linears",  # dequantized, close to the source
    "untouched": "tensors",  # equal to the source byte for byte
    "accounted": "tensors",  # every tensor of the source is there, and none besides
    "kv-scales": "scales",  # of every attention, and declared
    "files": "files",  # beside the weights, and digests
}
SHOWN = 5  # failures of a check that the summary lists


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that is wrong.

    Attributes:
        name: the tensor, linear or file.
        problem: what is wrong with it.
        remedy: what to do about it.
    """

    name: str
    problem: str
    remedy: str


@dataclass(slots=True)
class Check:
    """One check, filled while it looks.

    Attributes:
        id: its name, one of CHECKS.
        looked: how many things it looked at.
        failures: what is wrong.
        note: what it left out, or why it looked at nothing.
    """

    id: str
    looked: int = 0
    failures: list[Failure] = field(default_factory=list)
    note: str = ""

    def fail(self, name: str, problem: str, remedy: str) -> None:
        """Note a failure."""
        self.failures.append(Failure(name, problem, remedy))

    @property
    def status(self) -> str:
        """`failed`, `ok`, or `nothing` where it looked at nothing."""
        return "failed" if self.failures else "ok" if self.looked else "nothing"

    def to_json(self) -> dict[str, Any]:
        """The check as JSON values."""
        return {
            "id": self.id,
            "status": self.status,
            "looked": self.looked,
            "unit": CHECKS[self.id],
            "note": self.note,
            "failures": [{"name": f.name, "problem": f.problem, "remedy": f.remedy} for f in self.failures],
        }

    def lines(self) -> Iterator[str]:
        """The check in a line, and its first failures."""
        unit = CHECKS[self.id] if self.looked > 1 else CHECKS[self.id].removesuffix("s")
        counted = f"{self.looked:,} {unit}" if self.looked else "nothing to look at"
        wrong = f", {len(self.failures):,} wrong" if self.failures else ""
        note = f" ({self.note})" if self.note else ""
        status = {"failed": "FAILED", "ok": "ok", "nothing": "-"}[self.status]
        yield f"  {self.id:<12}{status:<8}{counted}{wrong}{note}"
        shown = self.failures[:SHOWN]
        for failure in shown:
            yield f"      {failure.name}: {failure.problem}"
        if len(self.failures) > len(shown):
            yield f"      and {len(self.failures) - len(shown):,} more"
        for remedy in dict.fromkeys(failure.remedy for failure in shown if failure.remedy):
            yield f"      → {remedy}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every check, in the order of CHECKS.

    Attributes:
        path: the artifact.
        against: the source it was compared with, or None.
    """

    path: str
    against: str | None
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that found something wrong."""
        return tuple(check for check in self.checks if check.failures)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failed

    def line(self) -> str:
        """The verdict in one line."""
        done = [check for check in self.checks if check.looked]
        if self.ok:
            return f"verified: {len(done)} checks, nothing wrong"
        return f"verified: {len(done)} checks, and wrong are {', '.join(check.id for check in self.failed)}"

    def summary(self) -> list[str]:
        """One line per check, failures below it."""
        lines = [f"{self.path}" + (f", against {self.against}" if self.against else "")]
        for check in self.checks:
            lines += check.lines()
        return [*lines, self.line()]

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {
            "path": self.path,
            "against": self.against,
            "ok": self.ok,
            "checks": [check.to_json() for check in self.checks],
        }
