"""Perplexity against transformers' own loss, window by window, with and without BOS, overlapping and ragged."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from zoo.models import VOCABULARY, full_model, prose

import quantkit
from quantkit.errors import CheckpointError, NumericalError, UsageError
from quantkit.eval.perplexity import Perplexity, perplexity
from quantkit.eval.windows import cut_windows, ratio_estimate

Zoo = Callable[..., Path]
Make = Callable[..., Any]
WITH_POSITIONS: dict[str, dict[str, int]] = {
    "opt": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(40))
    return file


def tokens_of(path: Path, text: Path) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])


@torch.no_grad()
def reference(model: Any, ids: Tensor, window: int, stride: int, prefix: tuple[int, ...] = ()) -> tuple[float, int]:
    """(mean loss, tokens) by the recipe of transformers' documentation: labels of -100 where a token was scored."""
    losses, counts, done = [], [], 0
    for start in range(0, len(ids), stride):
        part = ids[start : start + window - len(prefix)]
        row = torch.cat([torch.tensor(prefix, dtype=torch.long), part])[None]
        labels = row.clone()
        end = start + len(part)
        labels[:, : row.shape[1] - (end - done)] = -100
        count = int((labels[:, 1:] != -100).sum())
        if count:
            losses.append(float(model(row, labels=labels, use_cache=False).loss) * count)
            counts.append(count)
        done = end
        if end == len(ids):
            break
    return math.fsum(losses) / sum(counts), sum(counts)


def measured(path: Path, text: Path, **options: Any) -> Perplexity:
    return perplexity(path, data=str(text), device="cpu", **options)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 16), (16, 5), (30, 29), (60, None), (512, None)])
def test_it_is_transformers_loss(zoo: Zoo, text: Path, architecture: str, window: int, stride: int | None) -> None:
    path = zoo(architecture)
    ids = tokens_of(path, text)[:50]

    found = measured(path, text, window=window, stride=stride, max_tokens=50)

    nll, count = reference(full_model(path), ids, window, stride or window)
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.tokens == count and found.prefix == ()
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert (found.window, found.stride) == (window, stride or window)


@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 5), (17, 16), (512, None)])
def test_with_bos_every_window_starts_with_it_once(zoo: Zoo, text: Path, window: int, stride: int | None) -> None:
    path = zoo("llama", bos=True)
    ids = tokens_of(path, text)[:60]

    found = measured(path, text, window=window, stride=stride, max_tokens=60)

    nll, count = reference(full_model(path), ids, window, stride or window - 1, prefix=(1,))
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.tokens == count == 60  # the first token as well: BOS predicts it
    assert found.prefix == (1,) and found.stride == (stride or window - 1)


def test_every_token_weighs_the_same_in_a_ragged_last_window(zoo: Zoo, text: Path) -> None:
    path = zoo("llama")
    found = measured(path, text, window=16, max_tokens=16 + 3)

    model, ids = full_model(path), tokens_of(path, text)[:19]
    with torch.no_grad():
        logits = torch.cat([model(part[None]).logits[0, :-1] for part in (ids[:16], ids[16:])])
    targets = torch.cat([ids[1:16], ids[17:]])

    assert (found.tokens, found.windows) == (17, 2)
    assert found.nll == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), rel=1e-5)


def test_equal_logits_make_the_vocabulary(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(zoo("llama"), path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])}, path / "model.safetensors")

    found = measured(path, text, window=16, max_tokens=100)

    assert found.perplexity == pytest.approx(VOCABULARY, rel=1e-6)
    assert found.stderr == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_artifact_is_measured_as_the_model_that_loads(
    make_artifact: Make, text: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    made = make_artifact("llama", method=method)
    ids = tokens_of(made.path, text)[:120]

    found = measured(made.path, text, window=16, max_tokens=120)
    monkeypatch.setattr("quantkit.eval.perplexity._LOGITS", 7 * VOCABULARY)  # the logits of seven tokens at a time
    in_pieces = measured(made.path, text, window=16, max_tokens=120)

    loaded = quantkit.load(made.path, "cpu", dtype=torch.float32)
    assert found.nll == pytest.approx(reference(loaded, ids, 16, 16)[0], rel=1e-5)
    assert in_pieces.nll == pytest.approx(found.nll, rel=1e-6)
    assert found.nll != pytest.approx(measured(made.source, text, window=16, max_tokens=120).nll, rel=1e-6)


def test_the_result_says_what_it_is(zoo: Zoo, text: Path) -> None:
    found = measured(zoo("llama"), text, window=16, max_tokens=100)

    value = json.loads(json.dumps(found.to_json()))
    assert value["perplexity"] == found.perplexity and value["tokens"] == 100 - 7
    assert value["window"] == value["stride"] == 16 and value["prefix"] == [] and len(value["digest"]) == 64
    assert f"perplexity {found.perplexity:.3f} ± " in found.summary()[0]
    assert "no special token is added" in found.summary()[2]


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_one_window_has_no_spread_and_its_json_is_valid(zoo: Zoo, text: Path) -> None:
    found = measured(zoo("llama"), text, max_tokens=20)

    value = json.loads(json.dumps(found.to_json()), parse_constant=no_constant)
    assert found.windows == 1 and value["stderr"] is None and value["nll"] == found.nll
    assert not any("nan" in line or "±" in line for line in found.summary())


def test_a_perplexity_beyond_any_float_is_infinite(zoo: Zoo, text: Path) -> None:
    found = replace(measured(zoo("llama"), text, max_tokens=20), nll=1e4)

    assert found.perplexity == math.inf and "perplexity inf" in found.summary()[0]
    assert json.loads(json.dumps(found.to_json()), parse_constant=no_constant)["perplexity"] is None


def test_logits_that_are_not_finite_are_no_result(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][5] = math.inf
    save_file(tensors, path / "model.safetensors")

    with pytest.raises(NumericalError, match="logits are not finite"):
        measured(path, text, max_tokens=20)


def test_tokens_beyond_the_embedding_are_refused(zoo: Zoo, text: Path) -> None:
    with pytest.raises(CheckpointError, match=r"token \d+, and the model's embedding has 50 rows"):
        measured(zoo("llama", vocab_size=50), text, window=16)


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "gptj"])
def test_a_window_longer_than_the_table_of_positions_is_refused(zoo: Zoo, text: Path, architecture: str) -> None:
    path = zoo(architecture, **WITH_POSITIONS[architecture])

    assert measured(path, text, window=64).windows > 1
    with pytest.raises(UsageError, match=r"rows of 65 tokens are too long .* 64 positions") as refused:
        measured(path, text, window=65)
    assert "--window 64" in refused.value.hint


def test_a_config_that_asks_for_tuples_changes_nothing(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"return_dict": False}))

    assert measured(path, text, window=16).nll == measured(zoo("llama"), text, window=16).nll


def test_one_event_a_block(zoo: Zoo, text: Path) -> None:
    events: list[Any] = []

    measured(zoo("qwen2"), text, window=16, max_tokens=40, emit=events.append)

    assert [(type(e).__name__, e.block, e.blocks) for e in events] == [
        (kind, block, 3) for block in range(3) for kind in ("Stage", "BlockDone")
    ]


def test_the_ratio_and_its_error_by_hand() -> None:
    sums, counts = torch.tensor([2.0, 6.0, 4.0]), torch.tensor([1.0, 3.0, 4.0])

    ratio, error = ratio_estimate(sums.double(), counts.double())

    # r = 12 / 8; residuals 0.5, 1.5, -2, squares 0.25 + 2.25 + 4 = 6.5; sqrt(3 / 2 * 6.5) / 8
    assert ratio == 1.5
    assert error == pytest.approx(math.sqrt(9.75) / 8)
    assert math.isnan(ratio_estimate(sums[:1], counts[:1])[1])


@settings(deadline=None, max_examples=200)
@given(
    total=st.integers(2, 60),
    window=st.integers(2, 20),
    stride=st.integers(1, 20),
    prefix=st.sampled_from([(), (1,), (1, 2)]),
)
def test_every_token_is_scored_once(total: int, window: int, stride: int, prefix: tuple[int, ...]) -> None:
    ids = torch.arange(100, 100 + total)
    room = window - len(prefix)
    if room < 2 or stride > room:
        with pytest.raises(UsageError, match="cannot be scored"):
            cut_windows(ids, prefix, window, stride)
        return

    rows, scored = cut_windows(ids, prefix, window, stride)

    seen: list[int] = []
    for row, count in zip(rows, scored, strict=True):
        assert tuple(row[: len(prefix)].tolist()) == prefix and len(row) <= window
        assert 0 < count < len(row)  # something stands before every scored token
        seen += row[-count:].tolist()
    assert seen == sorted(set(seen))
    missing = set(ids.tolist()) - set(seen)
    assert missing == (set() if prefix else {100 + k for k in range(0, total, stride)} & missing)
    if stride < room and not prefix:
        assert missing == {100}


@pytest.mark.parametrize(("window", "stride"), [(1, None), (2, 3), (16, 17)])
def test_windows_that_cannot_be_scored(zoo: Zoo, text: Path, window: int, stride: int | None) -> None:
    with pytest.raises(UsageError, match="cannot be scored"):
        measured(zoo("llama"), text, window=window, stride=stride, max_tokens=40)
