"""The command line's entry: commands, exit codes, and errors in words. Holds no logic of its own.

Exit codes: 0 done; 1 done, but a budget was exceeded; 2 could not start; 3 this machine is too small;
70 a bug in quantkit; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from quantkit import __version__
from quantkit.cli import check, convert, evaluate, fit, inspect, quantize, report, verify
from quantkit.cli.console import Console
from quantkit.errors import QuantkitError, ResourceError, UsageError
from quantkit.patterns import closest

BUG = 70
INTERRUPTED = 130
# click's exception of every command line that cannot be read; typer carries its own copy of click
_UNREADABLE: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="quantkit",
    help="Quantize language models to 4 bits, and prove that the result is good",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quantize", rich_help_panel="Commands")(quantize.quantize)
app.command("check", rich_help_panel="Commands")(check.check)
app.command("convert", rich_help_panel="Commands")(convert.convert)
app.command("verify", rich_help_panel="Commands")(verify.verify)
app.command("inspect", rich_help_panel="Commands")(inspect.inspect)
app.command("fit", rich_help_panel="Commands")(fit.fit)
app.command("report", rich_help_panel="Commands")(report.report)
app.add_typer(evaluate.app, name="eval", rich_help_panel="Commands")


def _version(asked: bool) -> None:
    if asked:
        Console.open().data(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its code."""
    # descriptor 2 may be closed; the next file that is opened would take it, and get torch's warnings
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for name in ("SIGTERM", "SIGHUP"):  # so that what is temporary is removed; `nohup` ignores the second
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would print what the interpreter was about to free
    exec("")  # clears CPython's note of an interrupt inside another `exec`, for which it would kill itself at exit
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Nothing escapes as a traceback unless asked for."""
    verbose = "--verbose" in argv or bool(os.environ.get("QUANTKIT_DEBUG"))
    try:
        code = typer.main.get_command(app).main(list(argv), prog_name="quantkit", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as stop:
        code = stop.code
    except Exception as problem:
        return _report(problem, verbose)
    if code == INTERRUPTED:
        Console.open().error(QuantkitError("interrupted", "repeat the same command"))
    return code if isinstance(code, int) else 0


def _report(problem: Exception, verbose: bool) -> int:
    """Say what went wrong on stderr and return the exit code."""
    known = _in_our_words(problem)
    if verbose:
        traceback.print_exception(problem, file=sys.stderr)
    if known:
        Console.open().error(known)
        return known.exit_code
    words = " ".join(str(problem).split()) or "no message"
    hint = "this is a bug in quantkit; please report it"
    hint += "" if verbose else " with the traceback that `--verbose` prints"
    Console.open().error(QuantkitError(f"unexpected {type(problem).__name__}: {words}", hint))
    return BUG


def _in_our_words(problem: Exception) -> QuantkitError | None:
    """Turn what a user can meet into an error of ours; None is a bug."""
    if isinstance(problem, QuantkitError):
        return problem
    if isinstance(problem, _UNREADABLE):
        return _usage(problem)
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left for `{problem.filename or 'the output'}`", "free some disk, then repeat")
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceError("too many open files", "raise `ulimit -n`, then repeat")
    # by name: torch's own class would have to be imported to be caught
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return ResourceError("out of memory", "use fewer `--samples` or a shorter `--seq-len`, then repeat")
    return None


def _usage(problem: Any) -> UsageError:
    """Reword click's error as ours: lower case, backticks, no full stop, and one thing to do."""
    context = getattr(problem, "ctx", None)
    see = f"see `{context.command_path if context else 'quantkit'} --help`"
    if hasattr(problem, "possibilities"):
        near = closest(problem.option_name, _long_options(context))
        return UsageError(f"unknown option `{problem.option_name}`", f"did you mean `{near}`?" if near else see)
    text, _, suggestion = problem.format_message().replace("'", "`").partition("Did you mean ")
    text = text.partition(", unable to parse")[0].replace(": Input", ": the text").strip().rstrip(".")
    return UsageError(text[:1].lower() + text[1:], f"did you mean {suggestion}" if suggestion else see)


def _long_options(context: Any) -> list[str]:
    named = [name for each in context.command.params for name in (*each.opts, *each.secondary_opts)] if context else []
    return [name for name in named if name.startswith("--")]
