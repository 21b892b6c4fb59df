"""What a serving engine is: facts with their sources, and one question per matrix it would load. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from quantkit.scheme import PER_CHANNEL, Scheme

GPTQ, AWQ, COMPRESSED_TENSORS, MODELOPT = "gptq", "awq", "compressed-tensors", "modelopt"
# of checkpoints by other tools; quantkit writes none of these
ACT_ORDER = "groups in activation order (desc_act)"
GPTQ_V2 = "zero points of GPTQ version 2"
NO_ZERO_POINTS = "zero_point: false"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something an engine does, and how that is known.

    Attributes:
        text: one sentence without its full stop.
        source: a file and its release that was read, or what was run.
        date: year and month of that.
    """

    text: str
    source: str
    date: str = "2026-06"

    def to_json(self) -> dict[str, str]:
        """The fact as JSON values."""
        return {"text": self.text, "source": self.source, "date": self.date}


class Split(StrEnum):
    """How tensor parallelism divides a matrix between ranks."""

    COLUMN = "column"  # out_features
    ROW = "row"  # in_features
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Unit:
    """A matrix as an engine holds it on one rank: one linear of the checkpoint, or several as one.

    Attributes:
        name: the engine's name for it; a single linear keeps its own.
        names: linears of the checkpoint that are in it.
        parts: out_features of each part on one rank; experts count once.
        in_features: on one rank.
        whole_in_features: before tensor parallelism.
        split: how it is divided.
        ranks: between how many.
        experts: all experts of a layer are in it.
        problem: why it cannot be divided between the ranks at all; the sizes are those of the whole matrix then.
    """

    name: str
    names: tuple[str, ...]
    parts: tuple[int, ...]
    in_features: int
    whole_in_features: int
    split: Split
    ranks: int = 1
    experts: bool = False
    problem: str = ""

    @property
    def out_features(self) -> int:
        """On one rank, all parts together: what a kernel sees."""
        return sum(self.parts)

    @property
    def where(self) -> str:
        """Where these sizes hold, for messages; "" on one rank."""
        return f" on each of {self.ranks} ranks" if self.ranks > 1 else ""


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine's choice depends on besides the matrix.

    Attributes:
        dtype: of activations, as config.json names it: float16, bfloat16, or "" where it says nothing.
        quirks: what is unusual about a checkpoint: any of ACT_ORDER, GPTQ_V2 and NO_ZERO_POINTS.
    """

    dtype: str = ""
    quirks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether an engine loads a unit.

    Attributes:
        kernel: what computes it; "" means that it does not load.
        reason: why it does not, or why the kernel is a slower one.
        fact: where that is known from.
        hint: the remedy, where only one is possible.
    """

    kernel: str
    reason: str = ""
    fact: Fact | None = None
    hint: str = ""

    @property
    def loads(self) -> bool:
        """Whether there is a kernel."""
        return bool(self.kernel)

    @property
    def slow(self) -> bool:
        """Whether it loads, though not as fast as the engine can."""
        return self.loads and bool(self.reason)


def refusal(reason: str, fact: Fact | None = None, hint: str = "") -> Answer:
    """Answer no."""
    return Answer("", reason, fact, hint)


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer about several linears at once, beyond their shapes."""

    names: tuple[str, ...]
    answer: Answer


Schemes = Mapping[str, Scheme | None]


def _nothing(schemes: Schemes, fmt: str) -> Iterable[Whole]:
    return ()


@dataclass(frozen=True, slots=True)
class Cpu:
    """What an engine takes on a CPU, where that differs.

    Attributes:
        problem: (unit, scheme) -> why it does not load there; "" where it does.
    """

    fact: Fact
    problem: Callable[[Unit, Scheme], str]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's rules.

    Attributes:
        name: as users type it.
        title: release and hardware that the rules are about.
        formats: those it takes, the one to recommend first.
        refuses: {format: the fact} of the others.
        answer: (unit, scheme, format, model) -> whether a unit loads that its format allows.
        cache: {format: the fact} where it reads the scales of an FP8 cache from the checkpoint.
        no_cache: what it does with such scales in other formats.
        notes: {format: facts} worth knowing about what loads.
        whole: rules about all linears of a model together.
        cpu: its rules on a CPU, for a note; None where they are not known, or no others.
        fuses: the fact that q, k, v and gate, up and a layer's experts become one matrix each; None where they stay.
        splits: the fact that tensor parallelism divides matrices; None where there is none.
    """

    name: str
    title: str
    formats: tuple[str, ...]
    refuses: Mapping[str, Fact]
    answer: Callable[[Unit, Scheme, str, Model], Answer]
    cache: Mapping[str, Fact]
    no_cache: Fact
    notes: Mapping[str, tuple[Fact, ...]] = field(default_factory=dict)
    whole: Callable[[Schemes, str], Iterable[Whole]] = _nothing
    cpu: Cpu | None = None
    fuses: Fact | None = None
    splits: Fact | None = None


def packing_problem(unit: Unit, scheme: Scheme, fmt: str) -> str:
    """Say where a rank, or a part of a fused matrix, would begin inside a packed word; "" where none does.

    Words run along out_features in awq (codes and zero points), in gptq and in asymmetric compressed-tensors (zero
    points), and along in_features in gptq and compressed-tensors (codes); modelopt pairs output channels in a byte.
    """
    codes = 32 // scheme.bits
    if fmt == MODELOPT:
        along_out, along_in = 2, 1
    else:
        along_out = 1 if fmt == COMPRESSED_TENSORS and scheme.symmetric else codes
        along_in = 1 if fmt == AWQ else codes
    if odd := next((part for part in unit.parts if part % along_out), None):
        return f"{odd:,} output features{unit.where} are not a multiple of the {along_out} values in a word"
    if unit.in_features % along_in:
        return f"{unit.in_features:,} input features{unit.where} are not a multiple of the {along_in} codes in a word"
    return ""


def group_problem(unit: Unit, scheme: Scheme) -> str:
    """Say that a group of inputs would lie on two ranks; "" where none does."""
    group = scheme.group_size
    if group == PER_CHANNEL or unit.in_features % group == 0:
        return ""
    rest = unit.in_features % group
    return (
        f"{unit.in_features:,} input features{unit.where} are not a multiple of group size {group} (remainder {rest})"
    )
