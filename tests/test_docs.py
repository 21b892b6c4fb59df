"""What the documentation tells people to type: commands, options, recipes and links. Nothing is executed."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import quantkit
from quantkit.cli.app import app
from quantkit.cli.quantize import recipe_of
from quantkit.data.mix import read_mix
from quantkit.errors import QuantkitError
from quantkit.recipe import Recipe

ROOT = Path(quantkit.__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "calibration/*.md", "csrc/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
OPTION = re.compile(r"`(--[a-z][a-z-]*)(?:[ `=])")
ENGINE_OPTIONS = {"--kv-cache-dtype", "--quantization"}  # of vLLM, SGLang and TGI


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> Iterator[str]:
    yield from (body for kind, body in FENCE.findall(path.read_text(encoding="utf-8")) if kind == language)


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and arguments of every `quantkit` command line in a bash block."""
    for path in PAGES:
        for body in blocks(path, "bash"):
            for line in body.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["quantkit"]:
                    yield short(path), words[1:]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and its arguments."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no command {words[:1]} among {sorted(command.commands)}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def known_options() -> set[str]:
    """Every option of every command."""

    def below(command: Any) -> Iterator[str]:
        yield from (name for each in command.params for name in (*each.opts, *each.secondary_opts))
        for child in getattr(command, "commands", {}).values():
            yield from below(child)

    return {*below(typer.main.get_command(app)), "--help"}


def check(words: list[str]) -> None:
    """Parse one command line as the program would, and check the values that make a recipe."""
    command, arguments = command_of(words)
    if "--help" in arguments:
        return
    found = command.make_context(command.name, list(arguments)).params
    if command.name == "quantize":
        recipe_of(None, {field.name: found[field.name] for field in fields(Recipe)})


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_there_is_something_to_check() -> None:
    assert {"README.md", "docs/quickstart.md", "benchmarks/README.md"} <= {short(path) for path in PAGES}
    assert len(list(commands())) > 10


@pytest.mark.parametrize(("page", "words"), list(commands()), ids=lambda value: " ".join(value)[:60])
def test_commands_parse(page: str, words: list[str]) -> None:
    check(words)


def test_the_check_refuses_what_does_not_exist() -> None:
    unreadable: Any = typer.BadParameter.__mro__[2]  # the parser's exception; typer does not export it
    for line in ("quantise x", "quantize x --groupsize 3", "eval perplexity", "quantize x --method best"):
        with pytest.raises((AssertionError, QuantkitError, unreadable)):
            check(line.split())


def test_the_demo_parses() -> None:
    options = re.search(r"^QUANTIZE := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

    assert options
    check(["quantize", "model", "-o", "out", *shlex.split(options[1])])


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_options_in_the_text_exist(path: Path) -> None:
    if path.parent.name == "benchmarks":
        pytest.skip("its scripts have options of their own")

    assert {option for option in OPTION.findall(prose(path)) if option not in known_options() | ENGINE_OPTIONS} == set()


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_links_resolve(path: Path) -> None:
    broken = []
    for link in LINK.findall(prose(path)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in map(slug, HEADING.findall(prose(target)))):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_python_compiles_and_uses_public_names(path: Path) -> None:
    for body in blocks(path, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quantkit":
                assert node.attr in quantkit.__all__


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_recipes_are_valid(path: Path, tmp_path: Path) -> None:
    for body in blocks(path, "yaml"):
        file = tmp_path / "recipe.yaml"
        file.write_text(body, encoding="utf-8")
        if "sources" in yaml.safe_load(body):
            read_mix(file)
        else:
            Recipe.from_yaml(file).validate()


def test_every_page_is_reached_from_the_readme() -> None:
    links = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(ROOT / "README.md"))}

    assert [short(path) for path in PAGES if path.parent.name == "docs" and path not in links] == []


def test_the_version_of_python_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11 or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
