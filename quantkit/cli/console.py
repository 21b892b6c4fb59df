"""Where output goes, decided once: stdout carries only data, everything a person reads goes to stderr.

On a terminal a run draws one moving bar; elsewhere it writes one plain line a block. Draws; decides nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError
from quantkit.events import BlockDone, Emit, Event, Fallback, Note, Stage
from quantkit.units import gigabytes

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress, TaskID


class Verbosity(IntEnum):
    """How much stderr carries: errors; also blocks, warnings and a summary; also stages and tracebacks."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


@dataclass(frozen=True, slots=True)
class Console:
    """The two streams.

    Attributes:
        err: Rich console on stderr; it leaves colour out when NO_COLOR is set or stderr is no terminal.
        verbosity: how much stderr carries.
        animated: a bar may be drawn. Verbose output draws none, so that lines do not interleave.
    """

    err: RichConsole
    verbosity: Verbosity
    animated: bool

    @classmethod
    def open(cls, *, quiet: bool = False, verbose: bool = False) -> Console:
        """Look at the streams and decide."""
        from rich.console import Console as RichConsole

        verbosity = Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        err = RichConsole(file=sys.stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)
        return cls(err, verbosity, terminal and verbosity == Verbosity.NORMAL)

    def data(self, text: str) -> None:
        """Write a result to stdout. A reader that has gone (`| head`) is no error."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            # the interpreter flushes stdout once more at exit, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def result(self, value: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
        """Write a result to stdout, as one JSON object or as lines."""
        self.data(json.dumps(value, indent=2, ensure_ascii=False) if as_json else "\n".join(lines))

    def line(self, text: str) -> None:
        """Tell a person something."""
        if self.verbosity > Verbosity.QUIET:
            self.err.print(text)

    def warning(self, text: str) -> None:
        """Tell a person about something that is not as asked."""
        if self.verbosity > Verbosity.QUIET:
            self._labelled("warning", "yellow", text)

    def error(self, problem: QuantkitError) -> None:
        """Say what is wrong and, after a blank line, what to do about it."""
        self._labelled("error", "bold red", problem.message)
        if problem.hint:
            self.err.print()
            self._labelled("hint", "cyan", problem.hint)

    @contextmanager
    def progress(self, unit: str = "block") -> Iterator[Emit]:
        """Draw the events of a run while the context is open.

        Args:
            unit: what the run counts.
        """
        tally = Tally(unit)
        if not self.animated:
            yield lambda event: self._plain(tally, event)
            return
        with _bar(self.err) as bar:
            task = bar.add_task("", total=None, stage="", error="", left="", memory="")
            yield lambda event: self._animate(tally, bar, task, event)

    def _plain(self, tally: Tally, event: Event) -> None:
        if isinstance(event, Stage) and self.verbosity == Verbosity.VERBOSE:
            self.line(f"{tally.unit} {event.block + 1}/{event.blocks}  {event.stage}")
        elif isinstance(event, BlockDone):
            self.line(block_line(tally.unit, event))
        else:
            self._aside(event)

    def _animate(self, tally: Tally, bar: Progress, task: TaskID, event: Event) -> None:
        if isinstance(event, Stage):
            name = f"{tally.unit} {event.block + 1}/{event.blocks}"
            bar.update(task, description=name, total=event.blocks, completed=event.block, stage=event.stage)
        elif isinstance(event, BlockDone):
            tally.add(event)
            bar.update(
                task,
                total=event.blocks,
                completed=event.block + 1,
                error=f"error {tally.mean_error:.4f}" if tally.errors else "",
                left=f"{duration(tally.seconds_left)} left",
                memory=gigabytes(event.rss),
            )
        else:
            self._aside(event)

    def _aside(self, event: Event) -> None:
        if isinstance(event, Fallback):
            self.warning(f"{event.name}: {event.reason}")
        elif isinstance(event, Note):
            self.line(event.message)

    def _labelled(self, label: str, style: str, text: str) -> None:
        from rich.text import Text

        self.err.print(Text.assemble((f"{label}:", style), f" {text}"))


@dataclass(slots=True)
class Tally:
    """What the blocks of this session add up to; a resumed run counts only its own."""

    unit: str = "block"
    errors: int = 0
    error_sum: float = 0.0
    seconds: list[float] = field(default_factory=list)
    remaining: int = 0

    def add(self, event: BlockDone) -> None:
        """Count one block."""
        self.errors += len(event.errors)
        self.error_sum += sum(event.errors.values())
        self.seconds.append(event.seconds)
        self.remaining = event.blocks - event.block - 1

    @property
    def mean_error(self) -> float:
        """Mean relative output error of the linears so far."""
        return self.error_sum / self.errors

    @property
    def seconds_left(self) -> float:
        """Time the remaining blocks take at the pace so far."""
        return self.remaining * sum(self.seconds) / len(self.seconds)


def block_line(unit: str, event: BlockDone) -> str:
    """Write one block as a line: `block 7/32  error 0.0031  max 0.0047 (o_proj)  41.2 s  rss 4.1 GB`."""
    parts = [f"{unit} {event.block + 1}/{event.blocks}"]
    if event.errors:
        worst = max(event.errors, key=lambda name: event.errors[name])
        mean = sum(event.errors.values()) / len(event.errors)
        parts += [f"error {mean:.4f}", f"max {event.errors[worst]:.4f} ({worst.rpartition('.')[2]})"]
    return "  ".join([*parts, f"{event.seconds:.1f} s", f"rss {gigabytes(event.rss)}"])


def duration(seconds: float) -> str:
    """Write seconds as `50 s`, `12 min` or `3 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def aligned(rows: Sequence[tuple[str, ...]], left: Collection[int]) -> list[str]:
    """Write rows as lines, their columns one below the other.

    Args:
        left: numbers of the columns that begin at the left; the others end at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _bar(console: RichConsole) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("stage", "error", "left", "memory")]
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), *texts, console=console, transient=True
    )
