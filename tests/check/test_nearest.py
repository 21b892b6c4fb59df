"""Every hint of an engine's refusal names options under which everything loads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from check.shapes import Question, choices
from quantkit.check import refusals
from quantkit.engines import ENGINES
from quantkit.engines.base import ACT_ORDER, GPTQ_V2, NO_ZERO_POINTS
from quantkit.formats import FORMATS
from quantkit.scheme import Scheme

SIZES = st.sampled_from([12, 48, 64, 96, 128, 192, 320, 576, 924, 1024, 1152, 1536, 1848, 2048, 4304])
QUIRKS = {"gptq": (ACT_ORDER, GPTQ_V2), "awq": (NO_ZERO_POINTS,)}


@st.composite
def questions(draw: st.DrawFn) -> Question:
    target = draw(st.sampled_from(sorted(ENGINES)))
    fmt = draw(st.sampled_from(sorted(FORMATS)))
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    stored = draw(st.booleans())
    return Question(
        hidden=draw(SIZES),
        width=draw(SIZES),
        heads=kv * draw(st.sampled_from([1, 2, 3])),
        kv=kv,
        head=draw(st.sampled_from([12, 16, 64, 72, 128])),
        layers=1,
        experts=draw(st.sampled_from([0, 0, 2])),
        scheme=Scheme(
            draw(st.sampled_from([4, 8])), draw(st.sampled_from([-1, 16, 32, 64, 77, 128, 256])), draw(st.booleans())
        ),
        format=fmt,
        target=target,
        tp=draw(st.sampled_from([1, 2, 3, 4, 8])) if ENGINES[target].splits else 1,
        dtype=draw(st.sampled_from(["float16", "bfloat16", ""])),
        ignore=draw(st.sampled_from([(), (), ("*.down_proj",), ("*.q_proj", "*.k_proj", "*.v_proj")])),
        stored=stored,
        quirks=frozenset(draw(st.sets(st.sampled_from(QUIRKS[fmt])))) if stored and fmt in QUIRKS else frozenset(),
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(questions())
def test_what_a_hint_asks_for_loads(question: Question) -> None:
    found = question.ask()

    assert bool(found.hint) is not found.loads
    assert bool(found.message) is not found.loads
    for choice in choices(found.hint):
        asked = question.with_hint(choice)
        assert asked != question, f"{choice} changes nothing"
        again = asked.ask()
        assert again.loads, f"{question.ask().message}\nhint: {choice}\n{again.message}"
        assert again.kernels, f"{choice} quantizes nothing"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(questions())
def test_an_answer_accounts_for_every_packed_linear(question: Question) -> None:
    found = question.ask()
    packed = {name for name, scheme in question.schemes.items() if scheme is not None}
    lost = {name for verdict in found.refused for name in verdict.names}
    loaded = [name for verdict in found.verdicts if verdict.answer.loads for name in verdict.names]

    assert packed <= lost | set(loaded)
    assert len(loaded) == len(set(loaded)) == sum(found.kernels.values())
    facts = [verdict.answer.fact for verdict in found.verdicts if verdict.answer.fact] + list(found.notes)
    assert all(fact.text and fact.source for fact in facts)
    assert found.to_json()["loads"] is found.loads
    assert len(found.summary(every=True)) >= len(found.summary())
    if not question.stored:
        refused = refusals(
            question.shapes, question.schemes, question.format, question.target, tp=question.tp, config=question.config
        )
        assert set(refused) == lost
