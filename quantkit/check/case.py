"""One question to an engine: a model's shapes and schemes, a format, a number of ranks. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.engines import ENGINES, Engine
from quantkit.engines.base import Answer, Fact, Model, Schemes, Unit, refusal
from quantkit.engines.judgement import Judgement, Verdict
from quantkit.engines.units import Shape, build_units, text_config
from quantkit.errors import UnsupportedScheme, UsageError
from quantkit.formats import FORMATS
from quantkit.patterns import closest
from quantkit.scheme import Scheme

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_UNEQUAL = "the engine holds them as one matrix, which has one scheme"


@dataclass(frozen=True, slots=True)
class Case:
    """One question. `units` depend on shapes and ranks only, so that other schemes can be asked about cheaply.

    Attributes:
        stored: the checkpoint is there in this format already, so only the engine's law counts.
        quirks: of a stored checkpoint; see `Model`.
    """

    shapes: Mapping[str, Shape]
    schemes: Schemes
    format: str
    engine: Engine
    tp: int
    config: Mapping[str, Any]
    fp8_cache: bool
    stored: bool
    quirks: frozenset[str]
    units: tuple[Unit, ...] = field(repr=False)

    @classmethod
    def open(
        cls,
        shapes: Mapping[str, Shape],
        schemes: Schemes,
        fmt: str,
        target: str,
        tp: int,
        config: Mapping[str, Any],
        fp8_cache: bool = False,
        stored: bool = False,
        quirks: frozenset[str] = frozenset(),
    ) -> Case:
        for option, value, known in (("target", target, ENGINES), ("format", fmt, FORMATS)):
            if value not in known:
                near = closest(value, known)
                raise UsageError(
                    f"`--{option}` is `{value}`, which is not known",
                    f"did you mean `{near}`?" if near else f"choose one of {', '.join(known)}",
                )
        engine = ENGINES[target]
        if tp > 1 and not engine.splits:
            raise UsageError(f"`{target}` has no tensor parallelism for quantized models", "leave out `--tp`")
        kept: Schemes = {name: schemes.get(name) for name in shapes}
        units = tuple(build_units(shapes, config, tp=tp, fuses=engine.fuses is not None))
        return cls(shapes, kept, fmt, engine, tp, config, fp8_cache, stored, quirks, units)

    def at(self, tp: int) -> Case:
        """The same on another number of ranks."""
        units = build_units(self.shapes, self.config, tp=tp, fuses=self.engine.fuses is not None)
        return replace(self, tp=tp, units=tuple(units))

    @property
    def packed(self) -> tuple[str, ...]:
        """Linears that are quantized."""
        return tuple(name for name, scheme in self.schemes.items() if scheme is not None)

    def judge(self) -> Judgement:
        """The answer, without a hint."""
        verdicts = [*self._whole(), *self._by_unit()] if self.packed else []
        verdicts.sort(key=lambda verdict: (verdict.answer.loads, not verdict.answer.slow))
        return Judgement(
            self.engine.name, self.engine.title, self.format, self.tp, tuple(verdicts), tuple(self._notes())
        )

    def _whole(self) -> Iterator[Verdict]:
        """Answers about many linears at once."""
        if fact := self.engine.refuses.get(self.format):
            yield Verdict("*", self.packed, None, None, refusal(fact.text, fact))
            return
        if not self.stored:
            try:
                FORMATS[self.format].config(self.schemes, fp8_cache=self.fp8_cache)
            except UnsupportedScheme as error:
                yield Verdict("*", self.packed, None, None, refusal(error.message, None, error.hint))
        for whole in self.engine.whole(self.schemes, self.format):
            yield Verdict(_common(whole.names), whole.names, None, None, whole.answer)

    def _by_unit(self) -> list[Verdict]:
        if self.format in self.engine.refuses:
            return []
        alike: dict[Any, list[Unit]] = {}
        unequal = self._unequal_experts()
        for unit in self.units:
            schemes = tuple(dict.fromkeys(self.schemes[name] for name in unit.names))
            if schemes != (None,):
                key = (_kind(unit.name), unit.parts, unit.in_features, unit.problem, schemes, unit.name in unequal)
                alike.setdefault(key, []).append(unit)
        return [self._verdict(units, key[4], key[5]) for key, units in alike.items()]

    def _verdict(self, units: list[Unit], schemes: tuple[Scheme | None, ...], unequal: bool) -> Verdict:
        first = units[0]
        names = tuple(name for unit in units for name in unit.names)
        shape = (first.out_features, first.in_features)
        scheme = schemes[0] if len(schemes) == 1 else None
        if scheme is None or unequal:
            found = ", ".join(dict.fromkeys(str(each) if each else "16 bit" for each in schemes))
            leaves = ", ".join(dict.fromkeys(f"`{leaf(name)}`" for name in first.names))
            what = (
                f"{leaves} differ ({found})" if scheme is None else f"{leaves} differ from the other experts' linears"
            )
            hint = f"name {leaves} together in `--ignore` and `--override`"
            return Verdict(_kind(first.name), names, shape, scheme, refusal(f"{what}: {_UNEQUAL}", None, hint))
        return Verdict(_kind(first.name), names, shape, scheme, self._answer(first, scheme))

    def _answer(self, unit: Unit, scheme: Scheme) -> Answer:
        for shape in () if self.stored else dict.fromkeys(self.shapes[name] for name in unit.names):
            try:
                FORMATS[self.format].check(scheme, shape)
            except UnsupportedScheme as error:
                return refusal(error.message)
        if unit.problem:
            return refusal(unit.problem)
        dtype = text_config(self.config).get("dtype") or text_config(self.config).get("torch_dtype") or ""
        return self.engine.answer(unit, scheme, self.format, Model(str(dtype), self.quirks))

    def _unequal_experts(self) -> set[str]:
        """Names of expert stacks whose layer's other stack has another scheme."""
        layers: dict[str, list[Unit]] = {}
        for unit in self.units:
            if unit.experts:
                layers.setdefault(unit.name.rpartition(".")[0], []).append(unit)
        return {
            unit.name
            for units in layers.values()
            if len({self.schemes[name] for unit in units for name in unit.names}) > 1
            for unit in units
        }

    def _notes(self) -> Iterator[Fact]:
        if self.format in self.engine.refuses:
            return
        yield from self.engine.notes.get(self.format, ()) if self.packed else ()
        if self.fp8_cache:
            yield self.engine.cache.get(self.format, self.engine.no_cache)
        if self.engine.cpu is not None:
            lost = [(unit, problem) for unit in self.units if (problem := self._cpu_problem(unit))]
            if lost:
                unit, problem = lost[0]
                fact = self.engine.cpu.fact
                yield Fact(f"On a CPU, `{_kind(unit.name)}` does not load: {problem}", fact.source, fact.date)

    def _cpu_problem(self, unit: Unit) -> str:
        scheme = self.schemes[unit.names[0]]
        return self.engine.cpu.problem(unit, scheme) if self.engine.cpu is not None and scheme is not None else ""


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)


def leaf(name: str) -> str:
    """The last component of a name."""
    return name.rpartition(".")[2]


def _common(names: tuple[str, ...]) -> str:
    kinds = dict.fromkeys(_kind(name) for name in names)
    return ", ".join(list(kinds)[:3]) + (", …" if len(kinds) > 3 else "")
