"""An engine's answer about a whole model, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.engines.base import Answer, Fact
from quantkit.engines.units import Shape
from quantkit.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for all units that are alike.

    Attributes:
        where: the engine's name for them, block numbers as `*`.
        names: linears of the checkpoint that are in them.
        shape: (out_features, in_features) on one rank; None where the answer is not about a shape.
        scheme: of them all; None where they have none, or several.
    """

    where: str
    names: tuple[str, ...]
    shape: Shape | None
    scheme: Scheme | None
    answer: Answer

    def line(self) -> str:
        """The verdict in a line."""
        size = f" ({self.shape[0]:,} by {self.shape[1]:,})" if self.shape else ""
        kernel = f": {self.answer.kernel}" if self.answer.loads else ""
        reason = f": {self.answer.reason}" if self.answer.reason else ""
        return f"`{self.where}`{size}, {counted(len(self.names))}{kernel}{reason}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        answer = self.answer
        return {
            "where": self.where,
            "linears": list(self.names),
            "out_features": self.shape[0] if self.shape else None,
            "in_features": self.shape[1] if self.shape else None,
            "scheme": str(self.scheme) if self.scheme else None,
            "loads": answer.loads,
            "kernel": answer.kernel or None,
            "reason": answer.reason or None,
            "hint": answer.hint or None,
            "fact": answer.fact.to_json() if answer.fact else None,
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether an engine loads a model in one format.

    Attributes:
        engine: as users type it; `title` has its release and hardware.
        verdicts: of the packed linears; what does not load comes first, then what is slower.
        notes: facts to know when serving it.
        hint: the nearest choice that loads, where this one does not.
    """

    engine: str
    title: str
    format: str
    tp: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[Fact, ...] = ()
    hint: str = ""

    @property
    def refused(self) -> tuple[Verdict, ...]:
        """What does not load."""
        return tuple(verdict for verdict in self.verdicts if not verdict.answer.loads)

    @property
    def slow(self) -> tuple[Verdict, ...]:
        """What loads onto a slower kernel."""
        return tuple(verdict for verdict in self.verdicts if verdict.answer.slow)

    @property
    def loads(self) -> bool:
        """Whether everything loads."""
        return not self.refused

    @property
    def kernels(self) -> dict[str, int]:
        """{kernel: linears}."""
        counts: dict[str, int] = {}
        for verdict in self.verdicts:
            if verdict.answer.loads:
                counts[verdict.answer.kernel] = counts.get(verdict.answer.kernel, 0) + len(verdict.names)
        return counts

    @property
    def message(self) -> str:
        """What does not load and why, in one sentence; "" where everything does."""
        if self.loads:
            return ""
        found = "; ".join(verdict.line() for verdict in self.refused[:3])
        more = f"; and {len(self.refused) - 3} more" if len(self.refused) > 3 else ""
        ranks = f" on {self.tp} ranks" if self.tp > 1 else ""
        return f"{self.engine}{ranks} does not load this as `{self.format}`: {found}{more}"

    def to_json(self) -> dict[str, Any]:
        """The judgement as JSON values."""
        return {
            "target": self.engine,
            "engine": self.title,
            "format": self.format,
            "tp": self.tp,
            "loads": self.loads,
            "kernels": self.kernels,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "notes": [note.to_json() for note in self.notes],
            "hint": self.hint or None,
        }

    def summary(self, *, every: bool = False) -> list[str]:
        """The judgement as lines.

        Args:
            every: also list what loads well, and where each fact is from.
        """
        kernels = ", ".join(f"{count} on {kernel}" for kernel, count in self.kernels.items())
        lost = len({name for verdict in self.refused for name in verdict.names})
        state = f"does not load, for {counted(lost)}" if lost else f"loads: {kernels or 'nothing is quantized'}"
        lines = [f"{self.format}  {state}"]
        for verdict in self.verdicts if every else (*self.refused, *self.slow):
            lines.append(f"  {verdict.line()}")
            if every and verdict.answer.fact:
                lines.append(f"    {_cited(verdict.answer.fact)}")
        lines += [f"  note: {_cited(note) if every else note.text}" for note in self.notes]
        return lines + ([f"  nearest: {self.hint}"] if self.hint else [])


def counted(linears: int) -> str:
    """Write a number of linears."""
    return f"{linears} linear{'' if linears == 1 else 's'}"


def _cited(fact: Fact) -> str:
    return f"{fact.text} ({fact.source}, {fact.date})"
