"""Sources as they come: tied heads, extra tensors, biases, odd sidecars; and broken ones, refused by name at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo.artifacts import changed, packed_linears, read_all, read_config, twin
from zoo.models import full_model, rows

import quantkit
from quantkit.cli.app import run
from quantkit.events import Note
from quantkit.pipeline import quantize
from quantkit.recipe import Recipe

Make = Callable[..., Any]
Zoo = Callable[..., Path]
IDS = torch.stack(rows(16, seed=3))


@pytest.fixture
def source(zoo: Zoo, tmp_path: Path) -> Path:
    """A copy of a llama in one file that a test may spoil."""
    return Path(shutil.copytree(zoo("llama"), tmp_path / "source"))


def edit(path: Path, **tensors: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt"})


def edit_config(path: Path, **values: Any) -> None:
    (path / "config.json").write_text(json.dumps(read_config(path) | values, indent=2))


@pytest.mark.parametrize("architecture", ["gemma", "opt", "cohere2"])
def test_a_tied_head_stays_one_tensor(make_artifact: Make, architecture: str) -> None:
    made = make_artifact(architecture, method="gptq")

    names = read_all(made.path)
    assert not any("lm_head" in name for name in names)
    assert read_config(made.path)["tie_word_embeddings"] is True
    assert not any("embed" in name for name in changed(made.source, made.path))
    model = quantkit.load(made.path, "cpu", dtype=torch.float32)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_an_untied_copy_that_the_config_calls_tied_is_kept_and_loads(
    zoo: Zoo, calibration: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(zoo("gemma"), tmp_path / "source"))
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit(path, **{"lm_head.weight": embedding.clone()})

    record = quantize(Recipe(group_size=32, calibration=str(calibration), dtype="float32"), str(path), tmp_path / "out")

    assert record.tensors["source"] == len(read_all(path))
    assert "lm_head.weight" not in changed(path, tmp_path / "out")
    with torch.no_grad():
        loaded = quantkit.load(tmp_path / "out", "cpu", dtype=torch.float32)(IDS).logits
        assert torch.equal(loaded, twin(tmp_path / "out", tmp_path / "twin")(IDS).logits)


def test_everything_else_in_the_directory_comes_along(source: Path, calibration: Path, tmp_path: Path) -> None:
    extra = {
        "mtp.layers.0.proj.weight": torch.randn(64, 64).half(),
        "mtp.norm.weight": torch.randn(64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8),
        "counter": torch.tensor([3], dtype=torch.int64),
    }
    edit(source, **extra)
    edit_config(source, mystery={"deep": [1, 2.5, None]}, name="Ünïcode", torch_dtype="float16")
    sidecars = {
        "chat_template.jinja": b"{{ messages }}\r\n",
        "modeling_own.py": b"print('not run')\n",
        "generation_config.json": b'{"temperature": -1, "odd": }',
        "README.md": b"# model\n",
        "nested/notes.txt": b"\xff\xfe",
        "merges.txt": b"",
    }
    for name, content in sidecars.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    (source / "optimizer.pt").write_bytes(b"weights of another kind")

    out = tmp_path / "out"
    record = quantize(Recipe(group_size=32, calibration=str(calibration), dtype="float32"), str(source), out)

    assert not changed(source, out) & extra.keys()
    assert record.tensors["copied"] == len(read_all(source)) - len(record.linears)
    for name, content in sidecars.items():
        assert (out / name).read_bytes() == content, name
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "optimizer.pt").exists()
    config = read_config(out)
    assert config.pop("quantization_config") and config == read_config(source)
    assert "Ünïcode" in (out / "config.json").read_text(encoding="utf-8")
    written = {file.name for file in out.iterdir()} - {file.name for file in source.iterdir()}
    assert written == {"quantkit.json", "quantkit-recipe.yaml"}


@pytest.mark.parametrize("architecture", ["qwen2", "opt", "phi", "gpt_neox"])
def test_biases_are_kept(make_artifact: Make, architecture: str) -> None:
    made = make_artifact(architecture, method="gptq")

    biases = {name for name in read_all(made.source) if name.endswith(".bias")}
    assert biases and not biases & changed(made.source, made.path)


def test_float32_sources_get_bfloat16_scales(zoo: Zoo, calibration: Path, tmp_path: Path) -> None:
    model = full_model(zoo("llama"))
    model.save_pretrained(tmp_path / "source")
    for file in zoo("llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "source")

    quantize(Recipe(group_size=32, calibration=str(calibration)), str(tmp_path / "source"), tmp_path / "out")

    tensors = read_all(tmp_path / "out")
    assert {tensors[f"{linear}.weight_scale"].dtype for linear in packed_linears(tensors)} == {torch.bfloat16}
    assert tensors["model.norm.weight"].dtype == torch.float32


def test_a_checkpoint_of_the_bare_base_model_keeps_its_names(zoo: Zoo, calibration: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo("gemma"), tmp_path / "source"))
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, path / "model.safetensors")

    quantize(Recipe(group_size=32, calibration=str(calibration), dtype="float32"), str(path), tmp_path / "out")

    names = read_all(tmp_path / "out")
    assert "layers.0.mlp.up_proj.weight_packed" in names and not any(name.startswith("model.") for name in names)
    ignored = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert ignored == ["lm_head"]
    assert torch.isfinite(quantkit.load(tmp_path / "out", "cpu")(IDS).logits).all()


def test_float16_that_overflows_is_told_and_float32_does_not(
    source: Path, calibration: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit(source, **{"model.layers.0.post_attention_layernorm.weight": torch.full((64,), 3e4).half()})
    command = ["quantize", str(source), "-o", str(tmp_path / "out"), *options(calibration), "--method", "rtn"]

    assert run([*command, "--dtype", "float16"]) == 2
    error = capfd.readouterr().err
    assert "model.layers.0" in error and "not finite" in error and "--dtype float32" in error
    assert not (tmp_path / "out").exists()
    assert run([*command, "--dtype", "float32"]) == 0


def test_one_short_row_is_enough(zoo: Zoo, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"input_ids": [5, 9, 30]}\n')

    record = quantize(
        Recipe(group_size=32, calibration=str(file), dtype="float32"), str(zoo("llama")), tmp_path / "out"
    )

    assert all(entry["tokens"] == 3 and entry["damp"] >= 0.01 for entry in record.linears.values())
    assert torch.isfinite(quantkit.load(tmp_path / "out", "cpu")(IDS).logits).all()


def test_weights_of_several_dtypes_share_the_dtype_of_the_scales(
    source: Path, calibration: Path, tmp_path: Path
) -> None:
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    edit(source, **{"model.layers.0.mlp.down_proj.weight": weight.float()})

    quantize(Recipe(group_size=32, calibration=str(calibration), dtype="float32"), str(source), tmp_path / "out")

    tensors = read_all(tmp_path / "out")
    assert {tensors[f"{linear}.weight_scale"].dtype for linear in packed_linears(tensors)} == {torch.bfloat16}


def test_weights_too_small_for_the_scales_are_told(source: Path, calibration: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.v_proj"
    weight = load_file(source / "model.safetensors")[f"{name}.weight"]
    edit(source, **{f"{name}.weight": (weight.float() * 1e-5).half()})
    notes: list[Note] = []

    quantize(
        Recipe(group_size=32, calibration=str(calibration), dtype="float32"),
        str(source),
        tmp_path / "out",
        emit=lambda event: notes.append(event) if isinstance(event, Note) else None,
    )

    assert [note.message.split(" of its")[0] for note in notes if "lost" in note.message] == [f"{name} lost 100%"]


def test_a_name_with_a_superscript_is_a_name(source: Path, calibration: Path, tmp_path: Path) -> None:
    edit(source, **{"x.²": torch.zeros(2)})

    quantize(Recipe(method="rtn", group_size=32, calibration=str(calibration)), str(source), tmp_path / "out")

    assert "x.²" in read_all(tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("apertus", {}),  # activations with buffers that the checkpoint stores
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),  # takes tuples
    ],
)
def test_models_with_ways_of_their_own(
    zoo: Zoo, calibration: Path, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    path = zoo(architecture, **changes)
    recipe = Recipe(method="awq+gptq", bits=8, group_size=32, calibration=str(calibration), dtype="float32")

    quantize(recipe, str(path), tmp_path / "out")

    with torch.no_grad():
        expected, loaded = full_model(path)(IDS).logits, quantkit.load(tmp_path / "out", "cpu", dtype=torch.float32)
        assert torch.dist(loaded(IDS).logits, expected) < 0.05 * expected.norm()


def test_stored_buffers_are_used(zoo: Zoo, tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo("apertus"), tmp_path / "source"))
    edit(path, **{"model.layers.0.mlp.act_fn.beta": torch.tensor(3.0)})
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"input_ids": IDS[0].tolist()}))

    with torch.no_grad():
        loaded = quantkit.load(path, "cpu", dtype=torch.float32)(IDS).logits
        nll = torch.nn.functional.cross_entropy(loaded[0, :-1], IDS[0, 1:]).item()
        assert torch.allclose(loaded, full_model(path)(IDS).logits, atol=1e-4)
    assert quantkit.perplexity(path, data=str(file), device="cpu").nll == pytest.approx(nll, rel=1e-5)
    assert quantkit.perplexity(zoo("apertus"), data=str(file), device="cpu").nll != pytest.approx(nll, rel=1e-3)


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def pointer(path: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
    (path / "model.safetensors").write_text(text)


def missing_shard(path: Path) -> None:
    index = {"weight_map": dict.fromkeys(load_file(path / "model.safetensors"), "model-00001-of-00001.safetensors")}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def not_a_number(path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(path / "model.safetensors")[name]
    weight[3, 4] = torch.nan
    edit(path, **{name: weight})


def infinite_norm(path: Path) -> None:
    edit(path, **{"model.norm.weight": torch.full((64,), torch.inf).half()})


def no_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors")


def other_shape(path: Path) -> None:
    edit(path, **{"model.layers.1.mlp.up_proj.weight": torch.randn(96, 32).half()})


def larger_tower(path: Path) -> None:
    edit(path, **{f"vision.blocks.{i}.proj.weight": torch.randn(512, 512) for i in range(2)})


def padding_outside(path: Path) -> None:
    edit_config(path, pad_token_id=9999)


def no_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncated, "model.safetensors"),
    "lfs": (pointer, "Git LFS"),
    "missing shard": (missing_shard, "model-00001-of-00001.safetensors"),
    "nan": (not_a_number, "model.layers.1.mlp.up_proj.weight"),
    "inf": (infinite_norm, "model.norm.weight"),
    "missing tensor": (no_tensor, "model.layers.1.self_attn.k_proj.weight"),
    "other shape": (other_shape, "model.layers.1.mlp.up_proj.weight"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "cut config": (lambda path: (path / "config.json").write_text('{"model_type": '), "config.json"),
    "no tokenizer": (no_tokenizer, "tokenizer"),
    "unknown model": (lambda path: edit_config(path, model_type="nothing_like_it"), "nothing_like_it"),
    "quantized": (lambda path: edit_config(path, quantization_config={"quant_method": "gptq"}), "gptq"),
    "another list as long": (larger_tower, "vision.blocks.0.proj"),
    "padding": (padding_outside, "Padding_idx"),
    "more layers": (lambda path: edit_config(path, num_hidden_layers=3), "3 blocks"),
    "other vocabulary": (lambda path: edit_config(path, vocab_size=64), "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_source_exits_2_and_leaves_nothing(
    kind: str, source: Path, calibration: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, named = BROKEN[kind]
    spoil(source)
    before = sorted(tmp_path.iterdir())

    code = run(["quantize", str(source), "-o", str(tmp_path / "a" / "out"), *options(calibration)])

    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    error = err.split("error: ")[1]
    assert named in error and "hint: " in error
    assert sorted(tmp_path.iterdir()) == before


def test_an_artifact_is_no_source(make_artifact: Make, calibration: Path, tmp_path: Path, capfd: Any) -> None:
    made = make_artifact("llama", method="gptq")

    assert run(["quantize", str(made.path), "-o", str(tmp_path / "out"), *options(calibration)]) == 2

    assert "is quantized already" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def options(calibration: Path) -> list[str]:
    return ["--group-size", "32", "--dtype", "float32", "--calibration", str(calibration)]
