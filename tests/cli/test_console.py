"""The console: plain lines, the bar, labels, and what each verbosity lets through."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as RichConsole

from quantkit.cli.console import Console, Verbosity, block_line, duration
from quantkit.errors import UsageError
from quantkit.events import BlockDone, Event, Fallback, Note, Stage

ERRORS = {"model.layers.6.mlp.down_proj": 0.0015, "model.layers.6.self_attn.o_proj": 0.0047}
RUN: list[Event] = [
    Stage(6, 32, "observe"),
    Fallback("model.layers.6.mlp.up_proj", "damping raised to 0.1"),
    Note("resumed at block 7"),
    BlockDone(6, 32, ERRORS, 41.23, 4_100_000_000),
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            "warning: model.layers.6.mlp.up_proj: damping raised to 0.1\n"
            "resumed at block 7\n"
            "block 7/32  error 0.0031  max 0.0047 (o_proj)  41.2 s  rss 4.1 GB\n",
        ),
        (
            {"verbose": True},
            "block 7/32  observe\n"
            "warning: model.layers.6.mlp.up_proj: damping raised to 0.1\n"
            "resumed at block 7\n"
            "block 7/32  error 0.0031  max 0.0047 (o_proj)  41.2 s  rss 4.1 GB\n",
        ),
        ({"quiet": True}, ""),
    ],
)
def test_without_a_terminal_a_block_is_one_plain_line(
    options: dict[str, bool], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console.open(**options)

    with console.progress() as emit:
        for event in RUN:
            emit(event)

    assert capsys.readouterr() == ("", expected)


def test_a_block_that_was_kept_has_no_error() -> None:
    assert block_line("block", BlockDone(0, 2, {}, 0.31, 10**9)) == "block 1/2  0.3 s  rss 1.0 GB"


def test_lines_are_never_wrapped_or_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]" + "x" * 300 + " :smile: 12"

    Console.open().line(text)

    assert capsys.readouterr().err == text + "\n"


def terminal(file: io.StringIO, **options: bool) -> Console:
    err = RichConsole(file=file, force_terminal=True, width=120, markup=False, highlight=False, **options)
    return Console(err, Verbosity.NORMAL, animated=True)


def test_on_a_terminal_one_bar_says_where_the_run_is_and_how_long_it_takes() -> None:
    file = io.StringIO()

    with terminal(file).progress() as emit:
        for event in RUN:
            emit(event)

    drawn = file.getvalue()
    for part in ("block 7/32", "error 0.0031", "17 min left", "4.1 GB", "warning:", "damping raised to 0.1"):
        assert part in drawn, part


def test_no_color_leaves_colour_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = UsageError("no", "yes")
    coloured, plain = io.StringIO(), io.StringIO()
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal(coloured).error(problem)
    monkeypatch.setenv("NO_COLOR", "1")
    terminal(plain).error(problem)

    assert "\x1b[1;31merror:" in coloured.getvalue()
    assert "31m" not in plain.getvalue()


def test_an_error_is_a_fact_a_blank_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    Console.open(quiet=True).error(UsageError("`a` is [b]", "use `c`"))
    Console.open().error(UsageError("no hint"))

    assert capsys.readouterr() == ("", "error: `a` is [b]\n\nhint: use `c`\nerror: no hint\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (3540, "59 min"), (3600, "1 h 00 min"), (11100, "3 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
