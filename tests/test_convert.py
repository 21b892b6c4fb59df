"""From any format into any other: the same codes, the same zero points, and an account of every scale that moved."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats.independent import dequantize, read_safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo.artifacts import read_all, read_config
from zoo.models import prose, rows

import quantkit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.app import run
from quantkit.convert import convert
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedScheme, UsageError
from quantkit.events import Note
from quantkit.inspection import inspect
from quantkit.verify import require_verified, verify

Zoo = Callable[..., Path]
Make = Callable[..., Any]
Capture = pytest.CaptureFixture[str]
FOUR = ["compressed-tensors", "gptq", "awq", "modelopt"]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
checked = partial(convert, verify=require_verified)


@pytest.fixture(scope="module")
def four(make_artifact: Make) -> Path:
    """One calibration in every format, with the scales of an FP8 cache."""
    return make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8").path


@pytest.fixture(scope="module")
def free(make_artifact: Make) -> Path:
    """One calibration with free zero points, in both formats that hold any."""
    return make_artifact("llama", method="rtn", format=["compressed-tensors", "awq"], symmetric=False).path


def contents(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor."""

    def octets(tensor: Tensor) -> bytes:
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    return {name: (t.dtype, tuple(t.shape), octets(t)) for name, t in read_all(path).items()}


def weights(path: Path) -> dict[str, bytes]:
    """Every packed weight as an independent reader dequantizes it."""
    config = read_config(path)["quantization_config"]
    arrays = read_safetensors(path / "model.safetensors")
    names = {name.rpartition(".")[0] for name in arrays if name.endswith((".scales", ".weight_scale"))}
    return {name: dequantize(config, arrays, name).tobytes() for name in names}


def edited(path: Path, to: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Path:
    """A copy whose tensors and config.json were changed, without the record of its making."""
    shutil.copytree(path, to)
    tensors, config = load_file(to / "model.safetensors"), read_config(to)
    change(tensors, config)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    (to / "quantkit.json").unlink(missing_ok=True)
    return to


def no_change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    pass


def without_zeros(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Raise zero points of 0 to 1 in an AWQ checkpoint, so that GPTQ can say them."""
    for name, tensor in tensors.items():
        if name.endswith(".qzeros"):
            words = tensor.numpy().view(np.uint32)
            for shift in range(0, 32, 4):
                words[(words >> shift) & 15 == 0] += np.uint32(1 << shift)


# every pair


@pytest.mark.parametrize(("before", "after"), list(permutations(FOUR, 2)))
def test_a_conversion_gives_what_quantizing_in_that_format_gives(
    four: Path, tmp_path: Path, before: str, after: str
) -> None:
    made = checked(four / before, tmp_path / "out", after)

    assert contents(tmp_path / "out") == contents(four / after)
    assert read_config(tmp_path / "out") == read_config(four / after)
    assert weights(tmp_path / "out") == weights(four / before) and len(weights(four / before)) == 14
    names = {file.name for file in (four / after).iterdir()} - {"quantkit-recipe.yaml"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    total = sum(t.numel() for name, t in read_all(four / "awq").items() if name.endswith(".scales"))
    assert made.conversion.moved.to_json() == {"total": total, "moved": 0, "largest": 0.0, "where": ""}


@pytest.mark.parametrize(("before", "after"), [("compressed-tensors", "awq"), ("awq", "compressed-tensors")])
def test_free_zero_points_go_over(free: Path, tmp_path: Path, before: str, after: str) -> None:
    checked(free / before, tmp_path / "out", after)

    assert contents(tmp_path / "out") == contents(free / after)
    assert read_config(tmp_path / "out") == read_config(free / after)


@pytest.mark.parametrize("through", [["awq"], ["gptq", "awq"], ["modelopt", "gptq"], ["awq", "gptq", "modelopt"]])
def test_there_and_back_again(four: Path, tmp_path: Path, through: list[str]) -> None:
    path = four / "compressed-tensors"
    for index, name in enumerate([*through, "compressed-tensors"]):
        checked(path, tmp_path / str(index), name)
        path = tmp_path / str(index)

    assert contents(path) == contents(four / "compressed-tensors")
    assert read_config(path) == read_config(four / "compressed-tensors")


def test_free_zero_points_through_gptq_and_back(free: Path, tmp_path: Path) -> None:
    source = edited(free / "awq", tmp_path / "a", without_zeros)

    checked(source, tmp_path / "b", "gptq")
    checked(tmp_path / "b", tmp_path / "c", "awq")

    assert read_config(tmp_path / "b")["quantization_config"]["sym"] is False
    assert weights(tmp_path / "b") == weights(source)
    assert contents(tmp_path / "c") == contents(source)


@pytest.mark.parametrize("after", FOUR)
def test_what_was_converted_loads_runs_and_is_inspected(four: Path, tmp_path: Path, after: str) -> None:
    before = "awq" if after != "awq" else "gptq"
    checked(four / before, tmp_path / "out", after)
    (tmp_path / "text.txt").write_text(prose(60))
    ids = torch.stack(rows(12))

    logits = [quantkit.load(path, "cpu", dtype=torch.float32)(ids).logits for path in (four / before, tmp_path / "out")]
    measured = [
        quantkit.perplexity(path, data=str(tmp_path / "text.txt"), window=16, device="cpu")
        for path in (four / before, tmp_path / "out")
    ]
    seen = inspect(tmp_path / "out")

    assert torch.equal(*logits)
    assert measured[0].nll == measured[1].nll
    tensors = read_all(tmp_path / "out")
    packed = {name for name in tensors if name.endswith((".qweight", ".weight_packed"))}
    packed |= {name for name, t in tensors.items() if t.dtype == torch.uint8}
    assert seen.format == after and sum(seen.schemes.values()) == len(packed) == 14
    assert seen.bytes_by_kind["codes"] == sum(tensors[name].nbytes for name in packed)
    assert seen.bytes_by_kind["scales"] == sum(
        t.nbytes for name, t in tensors.items() if name.endswith((".scales", ".weight_scale"))
    )
    assert bool(seen.bytes_by_kind["zero points"]) is (after in ("gptq", "awq"))


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "opt"])
def test_other_architectures(make_artifact: Make, tmp_path: Path, architecture: str) -> None:
    made = make_artifact(architecture, method="awq", ignore=["re:.*layers\\.0\\..*"])

    checked(made.path, tmp_path / "out", "modelopt", max_shard_size="60KB")
    checked(tmp_path / "out", tmp_path / "back", "compressed-tensors")

    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert contents(tmp_path / "back") == contents(made.path)
    assert read_config(tmp_path / "back") == read_config(made.path)
    assert verify(tmp_path / "back", made.source).ok, "the folds on record explain what differs from the source"


def test_two_widths_side_by_side(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", override=["down_proj: bits=8"])

    checked(made.path, tmp_path / "out", "gptq")

    config = read_config(tmp_path / "out")["quantization_config"]
    assert (config["bits"], config["dynamic"]) == (4, {"+:.*\\.down_proj$": {"bits": 8, "group_size": 32}})
    assert weights(tmp_path / "out") == weights(made.path)
    with pytest.raises(UnsupportedScheme, match=rf"`{DOWN.replace('1', '0')}`: 8-bit codes have no place in `awq`"):
        convert(made.path, tmp_path / "other", "awq")


# scales


def scale_of(value: float) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        scale = tensors[f"{UP}.weight_scale"].float().fill_(0.5)
        scale[3, 1] = value
        tensors[f"{UP}.weight_scale"] = scale.bfloat16()

    return change


def test_scales_that_move_are_counted(make_artifact: Make, tmp_path: Path) -> None:
    # float16 has steps of 2^-24 below 2^-14: 1.5 of them become 2, which is 1/3 more
    source = edited(make_artifact("llama", method="rtn").path, tmp_path / "a", scale_of(1.5 * 2**-24))

    made = checked(source, tmp_path / "b", "gptq")

    found = made.conversion.moved
    assert (found.moved, found.where) == (1, UP) and found.largest == pytest.approx(1 / 3)
    # 2 blocks with groups of 32: q 64x2, k and v 32x2, o 64x2, gate and up 96x2, down 64x3
    assert found.total == 2 * (128 + 64 + 64 + 128 + 192 + 192 + 192)
    assert made.summary()[1] == f"1 of 1,920 scales moved, the furthest by 33.33% in {UP}"
    before, after = read_all(source)[f"{UP}.weight_scale"].float(), read_all(tmp_path / "b")[f"{UP}.scales"].float().T
    assert (after != before).nonzero().tolist() == [[3, 1]] and after[3, 1] == 2**-23
    record = json.loads((tmp_path / "b" / "quantkit.json").read_text())
    assert record["scales"] == {"total": 1920, "moved": 1, "largest": pytest.approx(1 / 3), "where": UP}


@pytest.mark.parametrize(("value", "becomes"), [(2.0**-30, "0"), (1e5, "inf")])
def test_a_scale_that_would_be_lost_is_refused(
    make_artifact: Make, tmp_path: Path, value: float, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = edited(make_artifact("llama", method="rtn").path, tmp_path / "a", scale_of(value))
    read = noted_reads(monkeypatch)

    with pytest.raises(UnsupportedScheme, match=rf"`{UP}` has a scale of .*, which is {becomes} as F16"):
        convert(source, tmp_path / "b", "awq")

    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert read and not [name for name in read if name.endswith(("weight_packed", "norm.weight"))]
    assert checked(source, tmp_path / "c", "modelopt").conversion.moved.moved == 0  # which has a place for bfloat16


# other tools' checkpoints


def second_version(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write the zero points of a GPTQ checkpoint as they are, as GPTQModel's second version does."""
    for name, tensor in tensors.items():
        if name.endswith(".qzeros"):
            tensors[name] = torch.from_numpy((tensor.numpy().view(np.uint32) + np.uint32(0x11111111)).view(np.int32))
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"


def test_the_second_version_of_gptq_becomes_the_first(four: Path, tmp_path: Path) -> None:
    source = edited(four / "gptq", tmp_path / "a", second_version)
    assert {
        word for name, t in read_all(source).items() if name.endswith("qzeros") for word in t.flatten().tolist()
    } == {
        -0x77777778  # eight times 8
    }

    checked(source, tmp_path / "b", "gptq")

    assert contents(tmp_path / "b") == contents(four / "gptq")
    assert read_config(tmp_path / "b") == read_config(four / "gptq")


def test_an_old_gptq_checkpoint_gets_what_it_lacks(four: Path, tmp_path: Path) -> None:
    def old(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]

    checked(edited(four / "gptq", tmp_path / "a", old), tmp_path / "b", "gptq")

    assert contents(tmp_path / "b") == contents(four / "gptq")


@pytest.mark.parametrize("key", ["compression_config", None])
def test_a_config_in_an_old_place_is_moved_to_the_new_one(four: Path, tmp_path: Path, key: str | None) -> None:
    def old(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        packing = config.pop("quantization_config")
        if key:
            config[key] = packing

    fmt = "compressed-tensors" if key else "gptq"  # which has a file of its own
    source = edited(four / fmt, tmp_path / "a", old)

    convert(source, tmp_path / "b", fmt)
    convert(source, tmp_path / "c", "awq")

    assert read_config(tmp_path / "b") == read_config(four / fmt)
    assert read_config(tmp_path / "c") == read_config(four / "awq")
    assert not (tmp_path / "c" / "quantize_config.json").exists()


def foreign_awq(zoo: Zoo, path: Path) -> dict[str, np.ndarray]:
    """Write a checkpoint as AutoAWQ does, bit by bit; returns its weights, as float32 products of float16 numbers."""
    shutil.copytree(zoo("llama"), path)
    tensors, config = load_file(path / "model.safetensors"), read_config(path)
    generator, found = np.random.default_rng(7), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        codes = generator.integers(0, 16, (rows, columns))
        zeros = generator.integers(0, 16, (rows, columns // 32))
        scales = generator.uniform(0.01, 0.1, (rows, columns // 32)).astype(np.float16)
        linear = name.removesuffix(".weight")
        for leaf, matrix in (("qweight", codes), ("qzeros", zeros)):
            words = np.zeros((matrix.shape[1], rows // 8), dtype=np.uint32)
            for feature in range(rows):
                place = (0, 4, 1, 5, 2, 6, 3, 7)[feature % 8]
                words[:, feature // 8] |= matrix[feature].astype(np.uint32) << np.uint32(4 * place)
            tensors[f"{linear}.{leaf}"] = torch.from_numpy(words.view(np.int32))
        tensors[f"{linear}.scales"] = torch.from_numpy(np.ascontiguousarray(scales.T))
        spread = scales.astype(np.float32).repeat(32, axis=1)
        found[linear] = (codes - zeros.repeat(32, axis=1)).astype(np.float32) * spread
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    said = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": None}
    (path / "quant_config.json").write_text(json.dumps(said))
    return found


def test_a_foreign_awq_checkpoint(zoo: Zoo, tmp_path: Path) -> None:
    expected = foreign_awq(zoo, tmp_path / "a")

    made = checked(tmp_path / "a", tmp_path / "b", "compressed-tensors")

    assert weights(tmp_path / "b") == {name: weight.tobytes() for name, weight in expected.items()}
    assert not (tmp_path / "b" / "quant_config.json").exists()
    plain = {name: each for name, each in contents(zoo("llama")).items() if not name.endswith("_proj.weight")}
    after = contents(tmp_path / "b")
    assert {name: after[name] for name in plain} == plain
    record = json.loads((tmp_path / "b" / "quantkit.json").read_text())
    assert "origin" not in record and record == made.to_json()
    assert read_config(tmp_path / "b").keys() - {"quantization_config"} == read_config(zoo("llama")).keys()


def test_zero_points_all_in_the_middle_are_symmetric(four: Path, tmp_path: Path) -> None:
    told: list[Any] = []

    checked(four / "awq", tmp_path / "out", "modelopt", emit=told.append)

    assert "all zero points are in the middle" in " ".join(e.message for e in told if isinstance(e, Note))
    assert read_config(tmp_path / "out")["quantization_config"]["has_zero_point"] is False


# what is refused


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors whose content is read from now on."""
    names: list[str] = []
    read, raw = Checkpoint.read, Checkpoint.raw_chunks

    def noting_read(self: Checkpoint, wanted: Any) -> Any:
        wanted = list(wanted)
        names.extend(wanted)
        return read(self, wanted)

    def noting_raw(self: Checkpoint, name: str, *rest: Any) -> Any:
        names.append(name)
        return raw(self, name, *rest)

    monkeypatch.setattr(Checkpoint, "read", noting_read)
    monkeypatch.setattr(Checkpoint, "raw_chunks", noting_raw)
    return names


def one_zero(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    without_zeros(tensors, config)
    tensors[f"{DOWN}.qzeros"][1, 2] &= ~0xF00


def act_order(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["desc_act"] = True
    tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"].flip(0)


def ordered(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["desc_act"] = True


def scaled_inputs(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[f"{UP}.pre_quant_scale"][4] = 2


def other_group(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64


def one_cache(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for which in "kv":
        del tensors[f"model.layers.1.self_attn.{which}_scale"]


def integer_cache(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_scheme"] |= {"type": "int"}


@pytest.mark.parametrize(
    ("fmt", "change", "to", "message"),
    [
        ("free/awq", one_zero, "gptq", rf"`{DOWN}`: .* stores zero points minus one"),
        ("free/awq", no_change, "modelopt", "asymmetric: `modelopt` has no zero points"),
        ("gptq", act_order, "compressed-tensors", rf"`{UP}` has groups that are not consecutive"),
        ("gptq", act_order, "awq", rf"`{UP}` has groups that are not consecutive"),
        ("modelopt", scaled_inputs, "awq", rf"`{UP}.pre_quant_scale` scales the inputs"),
        ("compressed-tensors", other_group, "awq", "does not fit its other parts"),
        ("compressed-tensors", one_cache, "modelopt", "`model.layers.1.self_attn` has no scales of its KV cache"),
        ("compressed-tensors", integer_cache, "modelopt", "the KV cache of `a` is 8-bit `int`"),
    ],
)
def test_what_cannot_be_said_is_refused_before_codes_are_read(
    four: Path,
    free: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fmt: str,
    change: Callable[..., None],
    to: str,
    message: str,
) -> None:
    group, _, name = fmt.rpartition("/")
    source = edited((free if group else four) / name, tmp_path / "a", change)
    read = noted_reads(monkeypatch)

    with pytest.raises(QuantkitError, match=message) as refused:
        convert(source, tmp_path / "b", to)

    assert refused.value.hint and refused.value.exit_code == 2
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert not [name for name in read if name.endswith((".weight", ".qweight", ".weight_packed"))]


def test_groups_in_order_are_no_act_order(four: Path, tmp_path: Path) -> None:
    checked(edited(four / "gptq", tmp_path / "a", ordered), tmp_path / "b", "awq")

    assert contents(tmp_path / "b") == contents(four / "awq")


def test_a_side_that_the_layout_cannot_hold(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("phi3", method="rtn", group_size=-1)  # qkv has 128 outputs, gate_up 192; all fit

    checked(made.path, tmp_path / "a", "gptq")
    with pytest.raises(UnsupportedScheme, match="TensorRT-LLM reads groups only"):
        convert(made.path, tmp_path / "b", "modelopt")

    assert weights(tmp_path / "a") == weights(made.path)


@pytest.mark.parametrize("name", FOUR)
def test_nothing_to_do_is_said(four: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is in `{name}` already"):
        convert(four / name, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_a_plain_checkpoint_is_not_quantized_on_the_way(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`model` is not quantized") as refused:
        convert(zoo("llama"), tmp_path / "out", "awq")

    assert refused.value.hint == "quantize it with `quantkit quantize --format awq`"
    with pytest.raises(UsageError, match="unknown format `gtpq`") as refused:
        convert(zoo("llama"), tmp_path / "out", "gtpq")
    assert refused.value.hint == "did you mean `gptq`?"


def test_a_verification_that_fails_leaves_nothing(four: Path, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def refuse(written: Path, source: Path) -> None:
        assert source == four / "awq"
        seen.append({file.name for file in written.iterdir()})
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        convert(four / "awq", tmp_path / "deep" / "out", "gptq", verify=refuse)

    assert {"model.safetensors", "config.json", "quantkit.json", "quantize_config.json", "tokenizer.json"} <= seen[0]
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_ends_early_leaves_nothing(four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Checkpoint, name: str) -> Any:
        raise CheckpointError("`x` became shorter while it was read")

    monkeypatch.setattr(Checkpoint, "raw_chunks", fail)
    with pytest.raises(CheckpointError, match="became shorter"):
        convert(four / "awq", tmp_path / "out", "gptq")

    assert list(tmp_path.iterdir()) == []


# the cache of keys and values, and the files beside the weights


def test_scales_of_a_cache_go_where_the_format_has_them(four: Path, tmp_path: Path) -> None:
    def known(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([0.25 + layer])
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.5 - layer / 4])

    source = edited(four / "compressed-tensors", tmp_path / "a", known)
    for file in source.glob("kv_cache_scales*"):
        file.unlink()
    told: list[Any] = []

    checked(source, tmp_path / "b", "modelopt")
    lost = checked(source, tmp_path / "c", "awq", emit=told.append)
    checked(tmp_path / "c", tmp_path / "d", "compressed-tensors")

    tensors = read_all(tmp_path / "b")
    found = {name: t.item() for name, t in tensors.items() if name.endswith(("k_scale", "v_scale"))}
    at = "model.layers.{}.self_attn.{}_proj.{}_scale"
    assert found == {
        at.format(0, "k", "k"): 0.25,
        at.format(0, "v", "v"): 0.5,
        at.format(1, "k", "k"): 1.25,
        at.format(1, "v", "v"): 0.25,
    }
    assert read_config(tmp_path / "b")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    for path in (tmp_path / "b", tmp_path / "c"):
        cache = json.loads((path / "kv_cache_scales.tp2.json").read_text())["kv_cache"]
        assert cache["scaling_factor"] == {rank: {"0": 0.5, "1": 1.25} for rank in "01"}
    assert not [name for name in read_all(tmp_path / "c") if name.endswith("k_scale")]
    assert [e for e in told if isinstance(e, Note) and "only SGLang gets them" in e.message]
    assert "for SGLang" in lost.summary()[2]
    assert contents(tmp_path / "d") == contents(source), "they are in quantkit.json, too"


def test_a_sidecar_alone_goes_over_as_it_is(four: Path, tmp_path: Path) -> None:
    source = edited(four / "gptq", tmp_path / "a", no_change)

    made = checked(source, tmp_path / "b", "compressed-tensors")

    file = "kv_cache_scales.tp4.json"
    assert (tmp_path / "b" / file).read_bytes() == (four / "gptq" / file).read_bytes()
    assert made.conversion.cache == {} and read_config(tmp_path / "b")["quantization_config"]["kv_cache_scheme"] is None


def test_an_artifact_of_a_cache_alone(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="none", kv_cache="fp8", group_size=128)

    checked(made.path, tmp_path / "a", "modelopt")
    checked(tmp_path / "a", tmp_path / "b", "compressed-tensors")

    assert contents(tmp_path / "b") == contents(made.path)
    with pytest.raises(UnsupportedScheme, match="no linear is packed"):
        convert(made.path, tmp_path / "c", "gptq")


def test_the_record_says_what_came_from_what(four: Path, tmp_path: Path) -> None:
    checked(four / "gptq", tmp_path / "a", "modelopt")
    made = checked(tmp_path / "a", tmp_path / "b", "awq")

    record = json.loads((tmp_path / "b" / "quantkit.json").read_text())
    original = json.loads((four / "gptq" / "quantkit.json").read_text())
    assert record == made.to_json()
    assert record["source"]["name"] == "a" and record["source"]["format"] == "modelopt" and record["format"] == "awq"
    assert record["origin"] == original and record["folds"] == original["folds"]
    data = (tmp_path / "b" / "model.safetensors").read_bytes()
    assert record["output"]["sha256"] == {"model.safetensors": hashlib.sha256(data).hexdigest()}
    assert record["linears"][UP] == {"scheme": "4-bit, group 32, symmetric"}
    assert not (tmp_path / "b" / "quantkit-recipe.yaml").exists()
    assert not (tmp_path / "b" / "hf_quant_config.json").exists()
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (four / "gptq" / name).read_bytes()


# the command line


def test_the_command_writes_and_verifies(four: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"

    code = run(["convert", str(four / "awq"), "-o", str(out), "--format", "gptq"])

    printed = capsys.readouterr()
    assert (code, printed.out) == (0, f"{out}\n")
    assert "converted 14 linears from awq to gptq" in printed.err and "verified: " in printed.err
    assert "1,920 scales, all stored as they were" in printed.err
    assert contents(out) == contents(four / "gptq")


def test_the_command_as_json_and_quiet(four: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    command = ["convert", str(four / "awq"), "-o", str(out), "--format", "modelopt", "--max-shard-size", "30KB"]

    assert run([*command, "--json", "-q"]) == 2
    refused = capsys.readouterr()
    assert refused.out == "" and "is not empty" in refused.err
    assert run([*command, "--json", "-q", "--overwrite"]) == 0

    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert printed.err == "" and record == json.loads((out / "quantkit.json").read_text())
    assert sorted(record["output"]["sha256"]) == sorted(file.name for file in out.glob("*.safetensors"))
    assert len(record["output"]["sha256"]) > 2


def test_what_the_command_refuses(zoo: Zoo, four: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = str(four / "awq"), str(tmp_path / "out")
    for given, message in (
        ([str(zoo("llama")), "-o", out, "--format", "gptq"], "is not quantized"),
        ([source, "-o", out, "--format", "awq"], "is in `awq` already"),
        ([source, "-o", out, "--format", "gguf"], "unknown format `gguf`"),
        ([source, "-o", out], "missing option `--format`"),
        ([source, "--format", "gptq"], "missing option `--out`"),
        ([source, "-o", source, "--format", "gptq", "--overwrite"], "is the source checkpoint itself"),
        ([source, "-o", f"{source}/x", "--format", "gptq"], "lies inside the source"),
        ([source, "-o", out, "--format", "gptq", "--max-shard-size", "big"], "`big` is no size"),
        ([str(tmp_path / "none"), "-o", out, "--format", "gptq"], "none"),
    ):
        assert run(["convert", *given]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and message in printed.err
    assert list(tmp_path.iterdir()) == []
