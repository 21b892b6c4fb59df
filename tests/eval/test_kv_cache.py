"""The cost of an FP8 KV cache: against a whole model run with such a cache, and with every source of scales."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache
from zoo.models import full_model, prose

from quantkit.blocks.kvcache import find_attentions
from quantkit.blocks.skeleton import build_skeleton
from quantkit.errors import CheckpointError, UnsupportedScheme, UsageError
from quantkit.eval.kv_cache import SIDECAR, CacheCost, sidecar_factors
from quantkit.eval.perplexity import Perplexity, perplexity
from quantkit.formats import FORMATS
from quantkit.formats.kv_cache import CacheScales, sglang_files
from quantkit.weights import WeightSource

Zoo = Callable[..., Path]
WINDOW, TOKENS = 16, 96


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(60))
    return file


def measured(path: Path, text: Path, **options: Any) -> Perplexity:
    return perplexity(path, data=str(text), device="cpu", window=WINDOW, max_tokens=TOKENS, **options)


def fp8(path: Path, text: Path) -> tuple[Perplexity, CacheCost]:
    found = measured(path, text, kv_cache="fp8")
    assert found.kv_cache is not None
    return found, found.kv_cache


def attentions(path: Path) -> dict[str, int]:
    return find_attentions(build_skeleton(path, WeightSource.open(path).tensors))


def with_scales(path: Path, tmp_path: Path, scales: dict[str, CacheScales]) -> Path:
    """A copy of a checkpoint that holds scales of its KV cache, and says so."""
    copy = Path(shutil.copytree(path, tmp_path / "scaled"))
    tensors = load_file(copy / "model.safetensors")
    for name, each in scales.items():
        tensors |= {f"{name}.k_scale": torch.tensor([each.k]), f"{name}.v_scale": torch.tensor([each.v])}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    packing = FORMATS["compressed-tensors"].config({}, fp8_cache=True)
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": packing}))
    return copy


def with_sidecar(path: Path, tmp_path: Path, content: Any) -> Path:
    copy = Path(shutil.copytree(path, tmp_path / "beside"))
    (copy / SIDECAR).write_text(json.dumps(content))
    return copy


class Fp8Cache(DynamicCache):
    """A cache of a whole model that rounds what it is given, at scales by layer."""

    def __init__(self, scales: list[CacheScales]) -> None:
        super().__init__()
        self.given = scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        each = self.given[layer_idx]
        pairs = ((key_states, each.k), (value_states, each.v))
        return tuple((x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s for x, s in pairs)


@torch.no_grad()
def reference(path: Path, text: Path, scales: list[CacheScales]) -> list[tuple[float, int]]:
    """(summed loss, tokens) of every window, by the whole model with a rounding cache."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), full_model(path)
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])[:TOKENS]
    losses = []
    for row in ids.split(WINDOW):
        logits = model(row[None], past_key_values=Fp8Cache(scales), use_cache=True).logits[0, :-1]
        losses.append((float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")), len(row) - 1))
    return losses


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "bloom"])
def test_it_is_the_loss_of_a_whole_model_with_such_a_cache(
    zoo: Zoo, text: Path, tmp_path: Path, architecture: str
) -> None:
    if architecture == "gpt_neox":  # its checkpoint has shards
        path = zoo(architecture)
        scales = [CacheScales(1.0, 1.0)] * 2
    else:
        scales = [CacheScales(0.02, 0.03), CacheScales(0.5, 4.0)]
        names = attentions(zoo(architecture))
        path = with_scales(zoo(architecture), tmp_path, {name: scales[i] for name, i in names.items()})

    found, cost = fp8(path, text)

    losses = reference(path, text, scales)
    nll = math.fsum(loss for loss, _ in losses) / sum(count for _, count in losses)
    assert found.nll == pytest.approx(nll, rel=1e-4)
    plain = measured(zoo(architecture), text)
    assert cost.nll_16bit == pytest.approx(plain.nll, rel=1e-9) and plain.kv_cache is None
    assert cost.difference == pytest.approx(found.nll - plain.nll, abs=1e-9)
    assert cost.scales == ("1.0" if architecture == "gpt_neox" else "artifact")
    assert 0 < cost.stderr < found.stderr  # the text's own spread is in both


def test_good_scales_cost_little_and_bad_ones_much(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    names, good = attentions(zoo("llama")), CacheScales(0.016, 0.016)

    def ratio(k: float, v: float, folder: str) -> float:
        (tmp_path / folder).mkdir()
        path = with_scales(zoo("llama"), tmp_path / folder, dict.fromkeys(names, CacheScales(k, v)))
        return fp8(path, text)[1].ratio

    assert ratio(good.k, good.v, "good") == pytest.approx(1, abs=0.03)
    assert abs(math.log(ratio(0.001, 0.001, "small"))) > 0.1
    assert abs(math.log(ratio(1e4, 1e4, "large"))) > 0.1


def test_the_sidecars_factor_is_used_for_both(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    path, scales = zoo("llama"), {0: CacheScales(0.01, 0.3), 1: CacheScales(0.5, 0.02)}
    both = {name: CacheScales(*2 * [max(scales[i].k, scales[i].v)]) for name, i in attentions(path).items()}

    beside, cost = fp8(with_sidecar(path, tmp_path, sglang_files("llama", scales)[SIDECAR]), text)

    assert cost.scales == "sidecar" and SIDECAR in cost.summary()
    assert beside.nll == fp8(with_scales(path, tmp_path, both), text)[0].nll
    assert beside.nll != fp8(path, text)[0].nll


def test_scales_of_the_artifact_go_before_the_sidecar(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    scaled = with_scales(zoo("llama"), tmp_path, dict.fromkeys(attentions(zoo("llama")), CacheScales(0.02, 0.02)))
    sidecar = sglang_files("llama", {i: CacheScales(50.0, 50.0) for i in range(2)})[SIDECAR]

    found, cost = fp8(with_sidecar(scaled, tmp_path, sidecar), text)

    assert cost.scales == "artifact"
    assert found.nll == fp8(scaled, text)[0].nll


def test_without_scales_it_is_one_and_says_so(zoo: Zoo, text: Path) -> None:
    _, cost = fp8(zoo("llama"), text)

    assert cost.scales == "1.0"
    assert "scale 1.0, as engines take it where an artifact has none" in cost.summary()


def test_a_layer_without_scales_beside_others_is_named(zoo: Zoo, text: Path, tmp_path: Path) -> None:
    first, second = attentions(zoo("llama"))
    path = with_scales(zoo("llama"), tmp_path, {first: CacheScales(0.02, 0.02)})

    with pytest.raises(CheckpointError, match=f"`{second}` has no scales"):
        fp8(path, text)
    content = {"kv_cache": {"scaling_factor": {"0": {"0": 0.1}}}}
    with pytest.raises(CheckpointError, match=f"`{second}` has no scales"):
        fp8(with_sidecar(zoo("llama"), tmp_path, content), text)


@pytest.mark.parametrize(
    "content",
    [{}, {"kv_cache": 3}, {"kv_cache": {"scaling_factor": {"0": [1, 2]}}}, {"kv_cache": {"scaling_factor": {"1": {}}}}],
)
def test_a_sidecar_of_another_structure_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="has no factors of the layers"):
        sidecar_factors(content)


@pytest.mark.parametrize("factor", [0, -1.0, "nan", "inf"])
def test_a_factor_that_is_no_scale_is_refused(factor: Any) -> None:
    with pytest.raises(CheckpointError, match="for layer 1, which is no scale"):
        sidecar_factors({"kv_cache": {"scaling_factor": {"0": {"0": 1.0, "1": factor}}}})


def test_the_result_says_what_it_is(zoo: Zoo, text: Path) -> None:
    found, cost = fp8(zoo("llama"), text)

    value = json.loads(json.dumps(found.to_json()))
    assert value["kv_cache"] == cost.to_json()
    assert set(cost.to_json()) >= {"dtype", "scales", "nll_16bit", "perplexity_16bit", "ratio"}
    assert cost.dtype == "fp8_e4m3" and value["nll"] == pytest.approx(cost.nll_16bit + cost.difference)
    assert value["perplexity"] == pytest.approx(cost.ratio * value["kv_cache"]["perplexity_16bit"])
    assert found.summary()[-1] == cost.summary() and f"{cost.ratio:.4f} times" in cost.summary()
    assert measured(zoo("llama"), text).to_json()["kv_cache"] is None


def test_one_window_has_no_spread(zoo: Zoo, text: Path) -> None:
    found = perplexity(zoo("llama"), data=str(text), device="cpu", max_tokens=20, kv_cache="fp8")

    assert found.to_json()["kv_cache"]["stderr"] is None
    assert not any("nan" in line for line in found.summary())


def test_every_weight_is_read_once(zoo: Zoo, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = WeightSource.read

    def count(self: WeightSource, names: Any, dtype: Any = None) -> dict[str, Tensor]:
        names = list(names)
        read.extend(names)
        return original(self, names, dtype)

    monkeypatch.setattr(WeightSource, "read", count)
    fp8(zoo("llama"), text)

    assert len(read) == len(set(read)) > 10


def test_a_model_without_a_cache_and_an_unknown_one_are_refused(zoo: Zoo, text: Path) -> None:
    with pytest.raises(UnsupportedScheme, match="no layer of the model keeps keys and values"):
        measured(zoo("mamba", state_size=8), text, kv_cache="fp8")
    with pytest.raises(UsageError, match=r"`--kv-cache` is `fp4`"):
        measured(zoo("llama"), text, kv_cache="fp4")
