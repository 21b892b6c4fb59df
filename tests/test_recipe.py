"""The recipe: YAML in and out, merging, ranges."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError, UnsupportedScheme, UsageError
from quantkit.formats import FORMATS
from quantkit.recipe import FORMAT_NAMES, Recipe, parse_size
from quantkit.scheme import Scheme

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
recipes = st.builds(
    Recipe,
    refine=st.none() | st.integers(0, 9),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**40),
    calibration=text,
    calibration_split=st.none() | text,
    ignore=st.lists(text, max_size=3).map(tuple),
)


def test_the_defaults_are_valid() -> None:
    assert Recipe().validate() == Recipe()
    assert Recipe().scheme == Scheme()


def test_every_format_has_its_name_in_the_recipe() -> None:
    assert tuple(FORMATS) == FORMAT_NAMES


@settings(deadline=None)
@given(recipe=recipes)
def test_yaml_keeps_every_field(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")

    assert Recipe.from_yaml(path) == recipe
    assert list(yaml.safe_load(Recipe().to_yaml())) == [field.name for field in fields(Recipe)]


def test_a_recipe_file_may_be_short_or_empty(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("")
    assert Recipe.from_yaml(path) == Recipe()

    path.write_text("method: awq\nignore: ['*.o_proj']\n")
    assert Recipe.from_yaml(path) == Recipe(method="awq", ignore=("*.o_proj",))


def test_one_text_stands_for_a_list_of_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("format: gptq\nignore: lm_head")

    assert Recipe.from_yaml(path) == Recipe(format=("gptq",), ignore=("lm_head",))
    assert Recipe(format="awq").validate() == Recipe(format=("awq",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("methd: awq", "has an unknown key `methd`", "did you mean `method`?"),
        ("group-size: 64", "has an unknown key `group-size`", "did you mean `group_size`?"),
        ("1: 2", "has an unknown key `1`", "the keys are method, bits"),
        ("samples: '128'", "`samples` is '128', and must be a whole number", ""),
        ("samples: true", "`samples` is True, and must be a whole number", ""),
        ("samples: null", "`samples` is None, and must be a whole number", ""),
        ("symmetric: 1", "`symmetric` is 1, and must be true or false", ""),
        ("method: 4", "`method` is 4, and must be text", ""),
        ("ignore: 3", "`ignore` is 3, and must be a list of texts", ""),
        ("ignore: [1]", "`ignore` is [1], and must be a list of texts", ""),
        ("method: awq\nbits: 4\nmethod: rtn", "line 3: `method` is given twice", ""),
        ("method: awq\nbits: [4", "line 2", ""),
        ("- a\n- b", "holds no `key: value` lines", ""),
        ("!!python/object/apply:os.getcwd []", "line 1: could not determine a constructor", ""),
    ],
)
def test_a_bad_recipe_file_is_a_usage_error(tmp_path: Path, content: str, message: str, hint: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)

    with pytest.raises(UsageError) as caught:
        Recipe.from_yaml(path)

    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint.startswith(hint)


def test_a_recipe_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Recipe.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"method: \xe9")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        Recipe.from_yaml(tmp_path / "latin.yaml")


def test_merging_takes_what_is_given() -> None:
    base = Recipe(method="awq", samples=8)

    assert base.merged(samples=16, method=None, ignore=None) == Recipe(method="awq", samples=16)
    assert base.merged(symmetric=False, ignore=["a"]) == Recipe(method="awq", samples=8, symmetric=False, ignore=("a",))
    with pytest.raises(UsageError, match="unknown key `sample`"):
        base.merged(sample=1)
    with pytest.raises(UsageError, match=r"`samples` is 1\.5"):
        base.merged(samples=1.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "gtpq"}, "`--method` is `gtpq`"),
        ({"format": "gguf"}, "`--format` is `gguf`"),
        ({"format": ("gptq", "ggu")}, "`--format` is `ggu`"),
        ({"format": ("gptq", "awq", "gptq")}, "`--format` names gptq, awq, gptq"),
        ({"format": ()}, "`--format` names nothing"),
        ({"kv_cache": "int8"}, "`--kv-cache` is `int8`"),
        ({"target": "vlm"}, "`--target` is `vlm`"),
        ({"tp": 0}, "`--tp` is 0, and must be at least 1"),
        ({"tp": 2}, "no engine is named"),
        ({"method": "none"}, "`--method none` leaves nothing to do"),
        ({"method": "none", "kv_cache": "fp8", "bits": 8}, "`--bits` says how weights are rounded"),
        ({"method": "none", "kv_cache": "fp8", "ignore": ("a",)}, "`--ignore` says how weights are rounded"),
        ({"indivisible": "skip"}, "`--indivisible` is `skip`"),
        ({"dtype": "int8"}, "`--dtype` is `int8`"),
        ({"samples": 0}, "`--samples` is 0, and must be at least 1"),
        ({"seq_len": 1}, "`--seq-len` is 1, and must be at least 2"),
        ({"seed": -1}, "`--seed` is -1"),
        ({"refine": -1}, "`--refine` is -1"),
        ({"device": "gpu"}, "`--device gpu` is no device"),
        ({"device": "cuda:"}, "`--device cuda:` is no device"),
        ({"device": "cuda:99999999999999999999"}, "is no device"),
        ({"calibration": " "}, "`--calibration` is empty"),
        ({"max_shard_size": "4XB"}, "`4XB` is no size"),
        ({"override": ("q_proj",)}, "override `q_proj`"),
        ({"bits": 3}, "3 bits"),
        ({"group_size": 0}, "group size 0"),
    ],
)
def test_every_field_has_a_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        Recipe(**given).validate()


def test_an_unknown_method_has_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        Recipe(method="gtpq").validate()

    assert caught.value.hint == "did you mean `gptq`? The choices are rtn, gptq, awq, awq+gptq, none"
    with pytest.raises(UnsupportedScheme):
        Recipe(bits=2).validate()


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_devices(device: str) -> None:
    assert Recipe(device=device, override=("re:.*a: bits=8",)).validate().overrides[0].pattern == "re:.*a"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("500MB", 500_000_000),
        ("4GB", 4_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2 kib", 2048),
        ("1TB", 10**12),
        ("123", 123),
        ("123B", 123),
        ("7m", 7_000_000),
    ],
)
def test_sizes(size: str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "-1GB", "0", "0.1B", "1e9", "4 G B", "1.GB"])
def test_what_is_no_size(size: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_size(size)


@pytest.mark.parametrize("text", ["bits: !!int x", "bits: 2001-13-45", "ignore: " + "[" * 5000])
def test_yaml_that_python_cannot_make_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)

    with pytest.raises(UsageError, match=r"recipe .* cannot be read"):
        Recipe.from_yaml(file)
