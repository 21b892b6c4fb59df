"""Every fact about an engine says where it is known from, and when that was."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import quantkit.engines
from quantkit.engines import ENGINES
from quantkit.engines.base import Engine, Fact
from quantkit.formats import FORMATS
from quantkit.recipe import TARGETS

MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])")


def facts_in(value: Any) -> Iterator[Fact]:
    """Facts held by a value, however deep."""
    if isinstance(value, Fact):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from facts_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from facts_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from facts_in(getattr(value, each.name))


def every_fact() -> list[Fact]:
    found: dict[str, Fact] = {}
    for module in pkgutil.iter_modules(quantkit.engines.__path__):
        names = vars(importlib.import_module(f"quantkit.engines.{module.name}"))
        for value in [value for name, value in names.items() if not name.startswith("__")]:
            found |= {fact.text: fact for fact in facts_in(value)}
    return list(found.values())


FACTS = every_fact()


def test_facts_are_found_in_every_engine() -> None:
    assert len(FACTS) > 50
    for engine in ENGINES.values():
        assert {fact.text for fact in facts_in(engine)} <= {fact.text for fact in FACTS}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.text[:40].replace(" ", "-"))
def test_a_fact_has_a_source_and_a_date(fact: Fact) -> None:
    assert MONTH.fullmatch(fact.date)
    assert fact.source.strip() == fact.source != ""
    assert re.search(r"[\w-]+/[\w./-]+|\.py\b|\brun with ", fact.source), "neither a file nor a run"
    assert not fact.text.endswith(".")
    assert fact.to_json() == {"text": fact.text, "source": fact.source, "date": fact.date}


def test_the_engines_are_those_that_users_may_name() -> None:
    assert tuple(ENGINES) == TARGETS
    assert all(name == engine.name for name, engine in ENGINES.items())


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_an_engine_has_an_answer_for_every_format(engine: Engine) -> None:
    assert set(engine.formats) | set(engine.refuses) == set(FORMATS)
    assert not set(engine.formats) & set(engine.refuses)
    assert set(engine.cache) <= set(engine.formats)
    assert set(engine.notes) <= set(engine.formats)
    assert len(set(engine.formats)) == len(engine.formats)
