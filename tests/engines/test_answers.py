"""What each engine answers about one matrix: its kernels, its limits, and checkpoints of other tools."""

from __future__ import annotations

import pytest

from quantkit.check import Judgement, judge
from quantkit.engines import ENGINES, marlin
from quantkit.engines.base import ACT_ORDER, GPTQ_V2, NO_ZERO_POINTS, Fact
from quantkit.engines.units import build_units
from quantkit.scheme import Scheme

ROWS, COLUMNS = 512, 1024
ROW = Scheme(4, -1)
FREE = Scheme(4, 128, False)


def ask(
    target: str,
    fmt: str,
    scheme: Scheme | None = None,
    *,
    shape: tuple[int, int] = (ROWS, COLUMNS),
    dtype: str = "float16",
    stored: bool = True,
    quirks: set[str] | None = None,
    fp8_cache: bool = False,
) -> Judgement:
    name = "model.layers.0.mlp.fc1"
    return judge(
        {name: shape},
        {name: scheme or Scheme()},
        fmt,
        target,
        config={"dtype": dtype},
        stored=stored,
        quirks=frozenset(quirks or ()),
        fp8_cache=fp8_cache,
    )


@pytest.mark.parametrize(
    ("target", "fmt", "scheme", "kernel"),
    [
        ("vllm", "compressed-tensors", Scheme(), "Marlin"),
        ("vllm", "compressed-tensors", Scheme(8, 128), "Marlin"),
        ("vllm", "compressed-tensors", FREE, "Marlin"),
        ("vllm", "compressed-tensors", ROW, "Marlin"),
        ("vllm", "compressed-tensors", Scheme(4, 16), "Exllama"),
        ("vllm", "compressed-tensors", Scheme(4, 256, False), "Triton"),
        ("vllm", "compressed-tensors", Scheme(8, 128, False), ""),
        ("vllm", "gptq", Scheme(), "Marlin"),
        ("vllm", "gptq", FREE, ""),
        ("vllm", "gptq", Scheme(4, 16), ""),
        ("vllm", "awq", FREE, "Marlin"),
        ("vllm", "awq", Scheme(4, 16, False), "AWQ"),
        ("vllm", "awq", Scheme(8, 128), ""),
        ("vllm", "modelopt", Scheme(), ""),
        ("sglang", "compressed-tensors", FREE, "Marlin"),
        ("sglang", "compressed-tensors", Scheme(4, 16), ""),
        ("sglang", "gptq", FREE, "Exllama"),
        ("sglang", "gptq", Scheme(4, 16), "Exllama"),
        ("sglang", "awq", Scheme(4, 16, False), "AWQ"),
        ("sglang", "awq", Scheme(8, 128), ""),
        ("sglang", "modelopt", Scheme(), ""),
        ("tgi", "compressed-tensors", Scheme(), "Marlin"),
        ("tgi", "compressed-tensors", FREE, ""),
        ("tgi", "compressed-tensors", Scheme(4, 16), ""),
        ("tgi", "gptq", FREE, "Exllama"),
        ("tgi", "gptq", Scheme(8, 16), "Triton"),
        ("tgi", "awq", FREE, "Marlin"),
        ("tgi", "awq", Scheme(4, 256, False), "AWQ"),
        ("tgi", "modelopt", Scheme(), ""),
        ("tensorrt-llm", "modelopt", Scheme(), "W4A16 CUTLASS"),
        ("tensorrt-llm", "modelopt", Scheme(4, 32), ""),
        ("tensorrt-llm", "awq", FREE, ""),
        ("transformers", "compressed-tensors", Scheme(8, 16), "decompressed"),
        ("transformers", "gptq", Scheme(), "gptqmodel"),
        ("transformers", "awq", FREE, "gptqmodel"),
        ("transformers", "awq", Scheme(8, 128), ""),
        ("transformers", "modelopt", Scheme(), ""),
    ],
    ids=str,
)
def test_kernels(target: str, fmt: str, scheme: Scheme, kernel: str) -> None:
    found = ask(target, fmt, scheme)

    assert found.kernels == ({kernel: 1} if kernel else {})
    assert found.loads is bool(kernel)
    assert all(verdict.answer.reason for verdict in found.refused)


@pytest.mark.parametrize(
    ("quirk", "fmt", "scheme", "target", "words"),
    [
        (ACT_ORDER, "gptq", Scheme(), "vllm", "GPTQ checkpoints with `desc_act` are refused"),
        (ACT_ORDER, "gptq", ROW, "vllm", ""),  # one group: nothing is in another order
        (ACT_ORDER, "gptq", Scheme(), "tgi", ""),
        (GPTQ_V2, "gptq", Scheme(), "tgi", "zero points of GPTQ version 2 are read wrongly"),
        (GPTQ_V2, "gptq", Scheme(), "vllm", ""),
        (NO_ZERO_POINTS, "awq", Scheme(), "vllm", ""),
        (NO_ZERO_POINTS, "awq", Scheme(), "tgi", ""),
    ],
)
def test_checkpoints_of_other_tools(quirk: str, fmt: str, scheme: Scheme, target: str, words: str) -> None:
    found = ask(target, fmt, scheme, quirks={quirk})

    assert found.loads is not bool(words)
    assert words in found.message
    assert not words or found.hint.startswith("`quantkit convert --format ")
    assert ask(target, fmt, scheme).loads


def test_what_is_unusual_may_cost_the_fast_kernel() -> None:
    assert ask("vllm", "awq", quirks={NO_ZERO_POINTS}).kernels == {"AWQ": 1}
    assert ask("vllm", "awq").kernels == {"Marlin": 1}
    assert ask("sglang", "gptq", quirks={GPTQ_V2}).kernels == {"Exllama": 1}


@pytest.mark.parametrize(("dtype", "kernel"), [("float16", {"Exllama": 1}), ("bfloat16", {}), ("", {})])
def test_exllama_computes_in_float16(dtype: str, kernel: dict[str, int]) -> None:
    found = ask("vllm", "compressed-tensors", Scheme(4, 16), dtype=dtype)

    assert found.kernels == kernel
    assert found.loads or "Exllama's needs float16 activations" in found.message


def test_sglang_is_started_in_float16_where_its_kernel_needs_that() -> None:
    reason = ask("sglang", "gptq", FREE, dtype="bfloat16").slow[0].answer.reason

    assert reason.endswith("start SGLang with `--dtype float16`")
    assert "float16" not in ask("sglang", "gptq", FREE).slow[0].answer.reason


@pytest.mark.parametrize(
    ("shape", "problem", "strict"),
    [
        ((64, 128), "", ""),
        ((128, 64), "", "N 128 by K 64 is no multiple of Marlin's tiles (K % 128 = 64)"),
        ((192, 64), "N 192 by K 64 is no multiple of Marlin's tiles (K % 128 = 64)", "(K % 128 = 64)"),
        ((96, 128), "N 96 by K 128 is no multiple of Marlin's tiles (N % 64 = 32)", "(N % 64 = 32)"),
        ((12, 576), "N 12 by K 576 is no multiple of Marlin's tiles (N % 64 = 12, K % 128 = 64)", "(N % 64 = 12"),
    ],
)
def test_tiles_of_marlin(shape: tuple[int, int], problem: str, strict: str) -> None:
    assert marlin.tile_problem(*shape) == problem
    assert strict in marlin.tile_problem(*shape, strict=True)
    assert bool(marlin.tile_problem(*shape, strict=True)) is bool(strict)


@pytest.mark.parametrize(
    ("shape", "group", "padded"),
    [
        ((960, 576), 64, (1024, 576)),
        ((576, 576), 64, (576, 640)),
        ((192, 64), 64, (256, 64)),
        ((12, 128), 128, (64, 128)),
        ((48, 4304), -1, (64, 4352)),
    ],
)
def test_padding_is_the_smaller_of_two(shape: tuple[int, int], group: int, padded: tuple[int, int]) -> None:
    n, k = marlin.padded(*shape, group)

    assert (n, k) == padded
    assert n >= shape[0] and k >= shape[1] and not marlin.tile_problem(n, k)
    assert group < 0 or k % group == 0


@pytest.mark.parametrize("target", ["vllm", "sglang", "tgi", "tensorrt-llm", "transformers"])
def test_what_becomes_of_an_fp8_cache_is_told_for_every_format(target: str) -> None:
    for fmt in ENGINES[target].formats:
        notes = [note.text for note in ask(target, fmt, fp8_cache=True).notes]
        told = ENGINES[target].cache.get(fmt, ENGINES[target].no_cache)
        assert isinstance(told, Fact) and told.text in notes
        assert told.text not in [note.text for note in ask(target, fmt).notes]


def test_a_cpu_is_a_note() -> None:
    odd = ask("vllm", "compressed-tensors", shape=(48, 1024))

    assert odd.loads
    assert any(
        note.text == "On a CPU, `model.layers.*.mlp.fc1` does not load: 48 features, no multiple of 32"
        for note in odd.notes
    )
    assert not any("On a CPU" in note.text for note in ask("vllm", "compressed-tensors").notes)


@pytest.mark.parametrize(
    ("leaf", "tp", "on_a_rank"),
    [
        ("q_proj", 2, (256, 1024)),
        ("o_proj", 2, (512, 512)),
        ("down_proj", 4, (512, 256)),
        ("up_proj", 4, (128, 1024)),
        ("gate", 4, (512, 1024)),  # a router: every rank has all of it
        ("q_a_proj", 4, (512, 1024)),
        ("unknown_out", 2, (512, 512)),  # back to the hidden size
        ("unknown_in", 2, (256, 1024)),
    ],
)
def test_division_between_ranks(leaf: str, tp: int, on_a_rank: tuple[int, int]) -> None:
    hidden = 512 if leaf == "unknown_out" else 1024
    config = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": hidden}
    (unit,) = build_units({f"model.layers.0.x.{leaf}": (ROWS, COLUMNS)}, config, tp=tp)

    assert (unit.out_features, unit.in_features) == on_a_rank
    assert unit.whole_in_features == COLUMNS and not unit.problem


def test_a_stored_qkv_is_divided_by_its_parts() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2}
    (unit,) = build_units({"model.layers.0.self_attn.qkv_proj": (12 * 64, 512)}, config, tp=4)

    assert unit.parts == (2 * 64, 64, 64)


def test_a_language_model_inside_another_is_read_by_its_own_config() -> None:
    config = {"num_attention_heads": 3, "text_config": {"num_attention_heads": 8, "num_key_value_heads": 8}}
    (unit,) = build_units({"model.language_model.layers.0.self_attn.q_proj": (512, 512)}, config, tp=2)

    assert unit.parts == (256,) and not unit.problem
