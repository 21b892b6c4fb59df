"""Budgets on the command line: their options, and their verdicts in the words of the machines that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from quantkit.cli.console import Console
from quantkit.errors import QuantkitError

OUTPUT_FORMATS = ("text", "json", "github", "junit")
EVALUATION = "Evaluation"

MaxPerplexityIncrease = Annotated[
    str | None,
    typer.Option("--max-perplexity-increase", help="3%, say", metavar="SHARE", rich_help_panel=EVALUATION),
]
MaxKl = Annotated[
    float | None,
    typer.Option("--max-kl", help="Mean KL, nats per token", metavar="NATS", rich_help_panel=EVALUATION),
]
MinTop1 = Annotated[
    str | None,
    typer.Option("--min-top1", help="Same most likely token", metavar="SHARE", rich_help_panel=EVALUATION),
]
MaxSize = Annotated[
    str | None,
    typer.Option("--max-size", help="Of its tensors: 4GB, say", metavar="SIZE", rich_help_panel=EVALUATION),
]

# (name of the artifact, its judgements as `Judgement.to_json` has them)
Judged = Sequence[tuple[str, Sequence[Mapping[str, Any]]]]


def over_budget(console: Console, judged: Judged) -> bool:
    """Say which limits were not kept, and whether there are any."""
    missed = [f"`{name}`: {each['said']}" for name, some in judged for each in some if not each["met"]]
    if missed:
        console.error(QuantkitError(f"over budget: {'; '.join(missed)}", "the artifact is kept, with its report"))
    return bool(missed)


def formatted(style: str, judged: Judged) -> str:
    """Write the verdicts as workflow commands of GitHub, or as a JUnit file."""
    return _github(judged) if style == "github" else _junit(judged)


def _github(judged: Judged) -> str:
    """One annotation for each limit; see GitHub's workflow commands for the escapes."""
    lines = []
    for name, some in judged:
        for each in some:
            level = "notice" if each["met"] else "error"
            said = f"{name}: {each['said']}".replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
            lines.append(f"::{level} title=quantkit {each['option']}::{said}")
    return "\n".join(lines)


def _junit(judged: Judged) -> str:
    """One test case for each limit of each artifact."""
    cases = [(name, each) for name, some in judged for each in some]
    failures = sum(not each["met"] for _, each in cases)
    suite = ElementTree.Element("testsuite", name="quantkit", tests=str(len(cases)), failures=str(failures))
    for name, each in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=_printable(name), name=each["option"])
        if not each["met"]:
            ElementTree.SubElement(case, "failure", message=_printable(each["said"]))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(character if character.isprintable() else "?" for character in text)
