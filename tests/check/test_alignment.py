"""Shapes that engines trip over: which load, which do not, what is said and what helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from check.shapes import Question, choices
from quantkit.check import judge, recommended_first, refusals
from quantkit.engines import ENGINES
from quantkit.errors import UsageError
from quantkit.scheme import Scheme

SMOL = Question(hidden=576, width=1536, heads=9, kv=3)
FOUR, EIGHT = Scheme(4, 64), Scheme(8, 64)


def test_a_hidden_size_of_576_takes_groups_of_64() -> None:
    found = SMOL.ask()

    assert not found.loads
    assert "576 input features are not a multiple of group size 128" in found.message
    assert found.hint.startswith("`--group-size 64`")
    assert replace(SMOL, scheme=FOUR).ask().loads


@pytest.mark.parametrize("target", ["sglang", "tgi"])
def test_a_hidden_size_of_576_without_padding_keeps_what_has_no_tiles(target: str) -> None:
    """960 and 576 outputs by 576 inputs are no tiles; AWQ has another kernel in SGLang, and in TGI none."""
    question = replace(SMOL, target=target)
    hint = [*choices(question.ask().hint)]

    if target == "sglang":
        assert hint == ["`--group-size 64` with `--format awq`"]
    else:
        kept = " ".join(f"--ignore '*.{each}_proj'" for each in "qkvo")
        assert hint == [f"`--group-size 64` with `{kept}`"]


def test_a_hidden_size_of_576_on_marlin() -> None:
    """576 is 9 times 64, so that 1,536 by 576 is made of tiles of 128 by 64; what has 960 or 576 outputs is padded."""
    found = replace(SMOL, scheme=FOUR).ask()

    assert found.loads
    assert {verdict.where.rpartition(".")[2]: verdict.answer.kernel for verdict in found.verdicts} == {
        "qkv_proj": "Marlin, padded",
        "o_proj": "Marlin, padded",
        "gate_up_proj": "Marlin",
        "down_proj": "Marlin",
    }
    padded = next(verdict for verdict in found.slow if verdict.where.endswith("qkv_proj"))
    assert padded.shape == (960, 576)
    assert "N 960 by K 576 is no multiple of Marlin's tiles (K % 128 = 64); padded to" in padded.answer.reason


@pytest.mark.parametrize("size", [128, 64, 32])
def test_no_usual_group_tiles_4304(size: int) -> None:
    question = Question(hidden=1152, width=4304, heads=16, kv=16, head=72, scheme=Scheme(4, size))
    found = question.ask()

    assert not found.loads
    assert f"4,304 input features are not a multiple of group size {size}" in found.message
    assert question.with_hint(next(choices(found.hint))).ask().loads


@pytest.mark.parametrize(
    ("rows", "fmt", "target", "words"),
    [
        (12, "compressed-tensors", "vllm", ""),
        (48, "compressed-tensors", "vllm", ""),
        (12, "gptq", "vllm", "12 output features are not a multiple of 32"),
        (48, "gptq", "vllm", "48 output features are not a multiple of 32"),
        (12, "awq", "vllm", "12 output features are not a multiple of 8"),
        (48, "awq", "vllm", ""),
        (12, "compressed-tensors", "sglang", "no multiple of Marlin's tiles (N % 64 = 12)"),
        (48, "compressed-tensors", "sglang", "no multiple of Marlin's tiles (N % 64 = 48)"),
        (48, "compressed-tensors", "tgi", "no multiple of Marlin's tiles"),
        (12, "modelopt", "tensorrt-llm", "N 12 % 16 = 12"),
        (48, "modelopt", "tensorrt-llm", ""),
        (12, "compressed-tensors", "transformers", ""),
    ],
)
def test_few_outputs(rows: int, fmt: str, target: str, words: str) -> None:
    found = judge({"model.layers.0.mlp.fc1": (rows, 256)}, {"model.layers.0.mlp.fc1": Scheme()}, fmt, target)

    assert found.loads is not bool(words)
    assert words in found.message
    assert found.loads or "`model.layers.*.mlp.fc1`" in found.message


def test_zero_points_of_few_outputs_have_no_whole_word() -> None:
    shapes = {"model.layers.0.mlp.fc1": (12, 256)}
    found = judge(shapes, dict.fromkeys(shapes, Scheme(symmetric=False)), "compressed-tensors", "vllm")

    assert "12 output features are not a multiple of 8" in found.message
    assert "`--symmetric`" in found.hint


def test_1848_inputs_on_two_ranks() -> None:
    """924 inputs on each are 115.5 words of codes, and so are 924 outputs of AWQ."""
    question = Question(hidden=1848, width=1848, heads=14, kv=2, head=132, scheme=Scheme(4, -1))
    one, two = question.ask(), replace(question, tp=2).ask()

    assert one.loads
    assert not two.loads
    assert "924 input features on each of 2 ranks are not a multiple of the 8 codes in a word" in two.message
    assert two.message.startswith("vllm on 2 ranks does not load this as `compressed-tensors`: ")
    assert [*choices(two.hint)] == ["`--tp 1`"]


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "words"),
    [
        (9, 3, 2, "heads do not divide between 2 ranks"),
        (9, 3, 3, ""),
        (12, 3, 2, "3 heads do not divide between 2 ranks"),
        (8, 2, 4, ""),  # a rank has a key head that another has, too
        (8, 2, 8, ""),
        (8, 8, 8, ""),
        (12, 2, 8, "12 heads do not divide between 8 ranks"),
        (12, 4, 6, "4 heads do not divide between 6 ranks"),
    ],
)
def test_heads_on_ranks(heads: int, kv: int, tp: int, words: str) -> None:
    question = Question(hidden=768, width=768 * 8, heads=heads, kv=kv, head=256, tp=tp, scheme=Scheme(4, 32))
    found = question.ask()

    assert found.loads is not bool(words)
    assert words in found.message
    for choice in choices(found.hint):
        assert "--tp" in choice and question.with_hint(choice).ask().loads


def test_a_repeated_key_head_counts_on_every_rank() -> None:
    found = Question(hidden=768, width=768, heads=8, kv=2, head=128, tp=4, scheme=Scheme(4, 32)).ask()
    fused = next(verdict for verdict in found.verdicts if verdict.where.endswith("qkv_proj"))

    assert fused.shape == (2 * 128 + 128 + 128, 768)


def test_a_group_must_not_lie_on_two_ranks() -> None:
    question = Question(width=640, tp=2)
    found = question.ask()

    assert "320 input features on each of 2 ranks are not a multiple of group size 128 (remainder 64)" in found.message
    assert question.with_hint("`--group-size 64`").ask().loads
    assert [*choices(found.hint)][:2] == ["`--group-size 64`", "`--tp 1`"]


@pytest.mark.parametrize("target", ["vllm", "sglang", "tgi"])
def test_linears_of_one_matrix_have_one_scheme(target: str) -> None:
    question = Question(target=target, scheme=FOUR)
    schemes = question.schemes | {"model.layers.0.self_attn.q_proj": EIGHT, "model.layers.1.mlp.up_proj": None}
    found = question.ask(schemes)

    assert not found.loads
    wheres = {verdict.where: verdict for verdict in found.refused}
    assert set(wheres) == {"model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp.gate_up_proj"}
    attention, feed = wheres["model.layers.*.self_attn.qkv_proj"], wheres["model.layers.*.mlp.gate_up_proj"]
    assert len(attention.names) == 3 and len(feed.names) == 2
    assert "`q_proj`, `k_proj`, `v_proj` differ (8-bit, group 64, symmetric, 4-bit" in attention.answer.reason
    assert "(4-bit, group 64, symmetric, 16 bit)" in feed.answer.reason
    assert "name `q_proj`, `k_proj`, `v_proj` together in `--ignore` and `--override`" in found.hint


def test_transformers_fuses_nothing() -> None:
    question = Question(target="transformers", scheme=FOUR)

    assert question.ask(question.schemes | {"model.layers.0.self_attn.q_proj": EIGHT}).loads


def test_experts_of_a_layer_have_one_scheme() -> None:
    question = Question(hidden=256, width=512, experts=4, scheme=FOUR)
    stack = {name: None for name in question.shapes if name.endswith("experts.2.down_proj")}
    found = question.ask(question.schemes | stack)

    assert question.ask().kernels == {"Marlin": 2 * (4 + 3 * 4)}
    assert not found.loads
    assert any("`down_proj` differ (4-bit, group 64, symmetric, 16 bit)" in v.answer.reason for v in found.refused)
    assert any("differ from the other experts' linears" in v.answer.reason for v in found.refused)


@pytest.mark.parametrize(
    ("fmt", "words"),
    [("gptq", "0 would wrap into its neighbour"), ("modelopt", "`modelopt` has no zero points")],
)
def test_formats_without_free_zero_points(fmt: str, words: str) -> None:
    target = "tensorrt-llm" if fmt == "modelopt" else "vllm"
    found = Question(scheme=Scheme(symmetric=False), format=fmt, target=target).ask()

    assert not found.loads
    assert words in found.message
    assert "`--symmetric`" in [*choices(found.hint)]


def test_a_stored_asymmetric_gptq_checkpoint_is_refused_by_vllm_and_taken_by_others() -> None:
    question = Question(scheme=Scheme(symmetric=False), format="gptq", stored=True, dtype="float16")
    found = question.ask()

    assert "GPTQ checkpoints with free zero points are refused" in found.message
    assert found.hint.startswith("`quantkit convert --format ")
    assert replace(question, target="sglang").ask().kernels == {"Exllama": 14}
    assert replace(question, target="tgi").ask().loads


def test_a_stored_checkpoint_is_judged_by_the_engine_alone() -> None:
    """The format would not write 48 outputs: what is there already need not be written."""
    shapes = {"model.layers.0.mlp.fc1": (48, 256)}
    schemes = {"model.layers.0.mlp.fc1": Scheme()}

    assert not judge(shapes, schemes, "gptq", "transformers").loads
    assert judge(shapes, schemes, "gptq", "transformers", stored=True).loads


def test_an_engine_that_takes_nothing_of_a_format_says_so() -> None:
    found = Question(format="gptq", target="tensorrt-llm").ask()

    assert "TensorRT-LLM's PyTorch backend reads no GPTQ checkpoints" in found.message
    assert [*choices(found.hint)] == ["`--format modelopt`"]
    assert found.notes == ()


def test_nothing_quantized_loads_everywhere() -> None:
    question = Question(ignore=("*_proj",))

    for target in ENGINES:
        assert replace(question, target=target).ask().loads


def test_the_best_comes_first() -> None:
    question = Question(hidden=576, width=1536, heads=9, kv=3, scheme=FOUR, target="sglang")
    order = recommended_first(replace(question, format=fmt).ask() for fmt in ("compressed-tensors", "gptq", "awq"))

    assert [(each.format, each.loads) for each in order] == [
        ("awq", True),
        ("compressed-tensors", False),
        ("gptq", False),
    ]
    well = Question(target="vllm")
    order = recommended_first(replace(well, format=fmt).ask() for fmt in ("gptq", "awq", "compressed-tensors"))
    assert [each.format for each in order] == ["compressed-tensors", "awq", "gptq"]


@pytest.mark.parametrize("symmetric", [True, False])
def test_another_format_is_named_only_where_it_loads(symmetric: bool) -> None:
    """TGI takes linears in 16 bit in compressed-tensors checkpoints alone, and these only where they are symmetric."""
    question = Question(target="tgi", format="awq", scheme=Scheme(symmetric=symmetric), ignore=("*.o_proj",))
    also = ", or `--format compressed-tensors`" if symmetric else ""

    assert question.ask().hint == f"quantize these linears too{also}"
    assert replace(question, ignore=()).ask().loads


def test_refusals_name_the_linears() -> None:
    found = refusals(SMOL.shapes, SMOL.schemes, "compressed-tensors", "vllm", config=SMOL.config)

    assert "model.layers.0.mlp.down_proj" not in found  # 1,536 inputs are 12 groups
    message, _ = found["model.layers.1.self_attn.k_proj"]
    assert message.startswith("vllm: `model.layers.*.self_attn.qkv_proj` (960 by 576), 6 linears: 576 input features")


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"target": "vlm"}, "`--target` is `vlm`, which is not known", "did you mean `vllm`?"),
        ({"format": "gptk"}, "`--format` is `gptk`, which is not known", "did you mean `gptq`?"),
        ({"format": "x"}, "`--format` is `x`", "choose one of compressed-tensors, "),
        ({"target": "transformers", "tp": 2}, "`transformers` has no tensor parallelism", "leave out `--tp`"),
    ],
)
def test_questions_that_are_none(changes: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        replace(Question(), **changes).ask()  # type: ignore[arg-type]

    assert caught.value.hint.startswith(hint)
