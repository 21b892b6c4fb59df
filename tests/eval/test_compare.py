"""KL against whole models of transformers, its noise floor, its parts by hand, and the one table."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from zoo.models import VOCABULARY, full_model, prose

import quantkit
from quantkit.errors import NumericalError, UsageError
from quantkit.eval.compare import Comparison, Divergence, compare, kl
from quantkit.eval.divergence import TokenScores, by_confidence, log_probabilities, percentiles, score, spread
from quantkit.eval.perplexity import perplexity

Zoo = Callable[..., Path]
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(60))
    return file


def measured(path: Path, reference: Path, text: Path, **options: Any) -> Divergence:
    return kl(path, reference, **{"data": str(text), "device": "cpu", "window": 16, "max_tokens": 120} | options)


@torch.no_grad()
def logits_of(model: Any, path: Path, text: Path, count: int, window: int, prefix: tuple[int, ...]) -> Tensor:
    """Logits that predict each scored token, by whole models, window by window."""
    ids = AutoTokenizer.from_pretrained(path)(text.read_text(), add_special_tokens=False)["input_ids"][:count]
    room = window - len(prefix)
    rows = [torch.tensor([*prefix, *ids[k : k + room]]) for k in range(0, count, room)]
    return torch.cat([model(row[None], use_cache=False).logits[0, :-1] for row in rows if len(row) > 1])


def kl_of(reference: Tensor, other: Tensor) -> Tensor:
    p, q = reference.double().softmax(-1), other.double().softmax(-1)
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize(
    ("architecture", "bos", "count"), [("llama", True, 100), ("llama", False, 99), ("gemma2", False, 50)]
)
def test_it_is_that_of_the_whole_models(
    make_artifact: Make, zoo: Zoo, text: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, bos: bool, count: int
) -> None:
    made = make_artifact(architecture, method="rtn")
    source, prefix = (zoo(architecture, bos=True), (1,)) if bos else (made.source, ())
    path = made.path
    if bos:  # the same weights behind another tokenizer
        path = text.parent / "bos"
        shutil.copytree(made.path, path, dirs_exist_ok=True)
        shutil.copy(source / "tokenizer.json", path)
    monkeypatch.setattr("quantkit.eval.together.LOGITS", 7 * VOCABULARY)

    found = measured(path, source, text, max_tokens=count)

    before = logits_of(full_model(source), source, text, count, 16, prefix)
    after = logits_of(quantkit.load(path, "cpu", dtype=torch.float32), source, text, count, 16, prefix)
    wanted = kl_of(before, after)
    assert found.conditions.tokens == found.kl.tokens == len(wanted)
    assert found.kl.mean == pytest.approx(float(wanted.mean()), abs=1e-5, rel=1e-5)
    assert found.kl.maximum == pytest.approx(float(wanted.max()), rel=1e-4)
    assert found.kl.at(99.0) == pytest.approx(np.percentile(wanted.numpy(), 99), rel=1e-4)
    assert found.kl.top1 == pytest.approx(float((before.argmax(-1) == after.argmax(-1)).double().mean()), abs=1e-9)
    assert found.nll == pytest.approx(perplexity(path, data=str(text), window=16, max_tokens=count).nll, rel=1e-6)
    assert found.nll_reference == pytest.approx(
        perplexity(source, data=str(text), window=16, max_tokens=count).nll, rel=1e-6
    )


def test_a_model_is_no_distance_from_itself(zoo: Zoo, text: Path) -> None:
    found = measured(zoo("llama"), zoo("llama"), text)

    assert found.kl.mean == found.kl.maximum == 0
    assert found.kl.top1 == 1 and found.difference == found.difference_stderr == 0
    assert found.perplexity_ratio == 1 and found.bytes_on_disk == found.reference_bytes > 0


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", torch.float16), ("qwen3", torch.bfloat16)])
def test_the_noise_floor_is_the_16_bit_model_against_itself(
    zoo: Zoo, text: Path, architecture: str, dtype: torch.dtype
) -> None:
    path = zoo(architecture)

    found = measured(path, path, text, floor_tokens=40)
    none = measured(path, path, text, floor_tokens=0)

    low = full_model(path).to(dtype)
    wanted = kl_of(*(logits_of(each, path, text, 48, 16, ()).float() for each in (full_model(path), low)))
    assert found.floor is not None and found.floor.dtype == str(dtype).removeprefix("torch.")
    assert found.floor.kl.tokens == 3 * 15  # 40 tokens are three windows, without the first token of each
    assert found.floor.kl.mean == pytest.approx(float(wanted.mean()), rel=0.5) and found.floor.kl.mean > 0
    assert none.floor is None and none.to_json()["noise_floor"] is None


def test_where_16_bits_overflow_there_is_no_floor(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    for name, factor in (("up_proj", 1000), ("down_proj", 10_000)):
        weight = tensors[f"model.layers.0.mlp.{name}.weight"]
        tensors[f"model.layers.0.mlp.{name}.weight"] = (weight.float() * factor).clamp(-6e4, 6e4).half()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    events: list[Any] = []

    found = measured(path, path, text, emit=events.append)

    assert found.floor is None and found.kl.mean == 0
    assert any("float16" in getattr(event, "message", "") for event in events)


def test_logits_that_are_not_finite_are_no_result(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][5] = math.inf
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(NumericalError, match=r"logits of .* are not finite"):
        measured(path, zoo("llama"), text)


def test_other_tokens_or_another_vocabulary_are_refused(zoo: Zoo, text: Path) -> None:
    with pytest.raises(UsageError, match="make different tokens"):
        measured(zoo("llama", bos=True), zoo("llama"), text)
    with pytest.raises(UsageError, match=r"knows 160 tokens, and .* 128"):
        measured(zoo("llama", vocab_size=160), zoo("llama"), text)
    with pytest.raises(UsageError, match="nothing to compare with"):
        compare([zoo("llama")], data=str(text))


def test_one_table_for_several(make_artifact: Make, text: Path) -> None:
    four, eight = make_artifact("llama", method="rtn"), make_artifact("llama", method="rtn", bits=8)
    options: dict[str, Any] = {"data": str(text), "device": "cpu", "window": 16, "max_tokens": 120}

    found = compare([four.path, eight.path], reference=four.source, **options)
    first = compare([four.source, four.path, eight.path], **options)

    assert [each.path for each in found.results] == [str(four.path), str(eight.path)]
    assert found.results[0].kl == measured(four.path, four.source, text).kl  # the company changes nothing
    assert found.results[1].kl.mean < found.results[0].kl.mean / 50
    assert [each.kl for each in first.results] == [each.kl for each in found.results]
    assert first.reference == str(four.source)
    rows = found.rows()
    assert len(rows) == 5 and len({len(row) for row in rows}) == 1
    assert f"{found.results[1].perplexity:.3f}" in rows[3] and rows[4][0] == "noise floor (float16)"


def test_the_json_is_complete_and_valid(make_artifact: Make, text: Path) -> None:
    made = make_artifact("llama", method="rtn")

    found = measured(made.path, made.source, text, max_tokens=16)  # one window has no spread
    value = json.loads(json.dumps(found.to_json(), allow_nan=False))

    assert value["kl"]["mean"] == found.kl.mean and value["kl"]["stderr"] is None
    assert value["difference_stderr"] is None and value["kl"]["percentiles"]["99.9"] == found.kl.at(99.9)
    assert sum(each["tokens"] for each in value["by_confidence"]) == value["tokens"] == 15
    assert value["noise_floor"]["dtype"] == "float16" and value["prefix"] == []
    assert not any("nan" in line for line in found.summary())
    assert not any("nan" in cell for row in Comparison("m", (found,)).rows() for cell in row)


def scores_of(kls: list[float], agree: list[bool] | None = None, confidence: list[float] | None = None) -> TokenScores:
    values = torch.tensor(kls, dtype=torch.float64)
    return TokenScores(
        values,
        torch.tensor(agree or [True] * len(kls)),
        values,
        values,
        torch.tensor(confidence or [0.5] * len(kls), dtype=torch.float64),
    )


def test_a_divergence_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]).log()

    found = score(log_probabilities(reference), log_probabilities(other), torch.tensor([1, 2]))

    assert found.kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0], abs=1e-7)
    assert found.agree.tolist() == [False, True]
    assert found.nll_reference.tolist() == pytest.approx([math.log(4), -math.log(0.8)], rel=1e-6)
    assert found.nll.tolist() == pytest.approx([math.log(2), -math.log(0.8)], rel=1e-6)
    assert found.confidence.tolist() == pytest.approx([0.5, 0.8], rel=1e-6)


def test_tokens_weigh_the_same_whatever_window_they_are_in() -> None:
    found = spread(scores_of([1.0, 1.0, 1.0, 5.0], [True, True, False, True]), [3, 1])

    # mean 2; residuals of the windows 3 - 6 and 5 - 2; sqrt(2 / 1 * 18) / 4
    assert found.mean == 2 and found.stderr == pytest.approx(1.5)
    assert found.top1 == 0.75 and found.maximum == 5 and found.at(50.0) == 1


def test_percentiles_are_numpys() -> None:
    values = torch.rand(777, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    percents = (0.0, 12.5, 50.0, 99.9, 100.0)

    assert percentiles(values, percents) == pytest.approx(np.percentile(values.numpy(), percents).tolist())
    assert percentiles(values[:1], percents) == [float(values[0])] * 5


def test_bins_take_every_token_once() -> None:
    confidence = [0.0, 0.2, 0.25, 0.9, 1.0, 1.0 + 1e-12]
    found = by_confidence(scores_of([1, 2, 3, 4, 5, 9], [True, False, True, True, False, True], confidence))

    assert [(each.low, each.tokens, each.mean) for each in found] == [(0.0, 2, 1.5), (0.25, 1, 3.0), (0.9, 3, 6.0)]
    assert [each.top1 for each in found] == pytest.approx([0.5, 1.0, 2 / 3])
