"""Named recipes: what comes with quantkit parses, what is wrong is named, shares hold in every prefix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.data.builtin import calibration_root
from quantkit.data.corpus import load_corpus
from quantkit.data.mix import Part, blend, mix_names, read_mix
from quantkit.data.rows import Document
from quantkit.errors import UsageError


def rows(path: Path, name: str, count: int) -> None:
    path.write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(count)))


def recipe(path: Path, text: str) -> str:
    (path / "mix.yaml").write_text(text)
    return str(path / "mix.yaml")


@pytest.mark.parametrize("name", mix_names())
def test_every_recipe_that_comes_along_parses(name: str) -> None:
    mix = read_mix(calibration_root() / f"{name}.yaml")
    assert mix.parts and all("/" in part.source for part in mix.parts)


def test_recipes_come_along() -> None:
    assert {"wikitext", "ultrachat", "code", "chat-and-code"} <= set(mix_names())


def test_a_named_recipe_asks_the_hub_for_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    calls = []

    def load_dataset(*args: object, **options: object) -> list:
        calls.append((args, options))
        return [{"text": " = Title = \n"}, {"text": ""}, {"text": "words\n"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext").mkdir()  # a folder of the same name is no obstacle
    corpus = load_corpus("wikitext")
    assert calls == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "train", "streaming": True})]
    assert (corpus.source, corpus.stream, corpus.rows, corpus.empty) == ("wikitext", True, 3, (2,))


def test_shares_and_faults_of_a_recipe(tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", "a", 10)
    rows(tmp_path / "b.jsonl", "b", 2)
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("{\n")
    listed = "sources:\n- {source: a.jsonl, share: 3}\n- {source: ./b.jsonl, share: 1}\n"
    corpus = load_corpus(recipe(tmp_path, listed))
    assert Counter(document.text[0] for document in corpus.documents) == {"a": 9, "b": 2}
    assert (corpus.rows, corpus.bad, corpus.stream) == (13, ((3, "./b.jsonl: bad JSON"),), False)


def test_without_shares_everything_is_taken_in_order(tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", "a", 2)
    rows(tmp_path / "b.jsonl", "b", 1)
    corpus = load_corpus(recipe(tmp_path, "stream: true\nsources:\n- source: b.jsonl\n- source: a.jsonl\n"))
    assert [document.text for document in corpus.documents] == ["b0", "a0", "a1"]
    assert corpus.stream


def test_the_character_limit_is_divided_by_share(tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", "a", 10)
    rows(tmp_path / "b.jsonl", "b", 10)
    path = recipe(tmp_path, "sources:\n- {source: a.jsonl, share: 3}\n- {source: b.jsonl, share: 1}\n")
    corpus = load_corpus(path, characters=16)
    assert Counter(document.text[0] for document in corpus.documents) == {"a": 6, "b": 2}
    assert corpus.partial


def test_running_text_and_rows_do_not_mix_silently(tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", "a", 2)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(UsageError, match=r"mixes running text \(`t.txt`\) with rows"):
        load_corpus(recipe(tmp_path, "sources:\n- source: a.jsonl\n- source: t.txt\n"))
    assert load_corpus(recipe(tmp_path, "stream: true\nsources:\n- source: a.jsonl\n- source: t.txt\n")).stream
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}')
    with pytest.raises(UsageError, match=r"streams `a.jsonl`, which does not hold plain text"):
        load_corpus(recipe(tmp_path, "stream: true\nsources:\n- source: a.jsonl\n"))


@pytest.mark.parametrize("nested", ["mix.yaml", "wikitext"])
def test_recipes_do_not_nest(tmp_path: Path, nested: str) -> None:
    with pytest.raises(UsageError, match="names the recipe"):
        load_corpus(recipe(tmp_path, f"sources:\n- source: {nested}\n"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "a recipe is not a mapping"),
        ("- a", "a recipe is not a mapping"),
        ("{", "cannot be read"),
        ("!!python/object/apply:os.getcwd []", "cannot be read"),
        ("sources: []", "lists no `sources`"),
        ("stream: true", "lists no `sources`"),
        ("sources: [builtin]", "a source is not a mapping"),
        ("sources: [{source: builtin}]\nseed: 1", "unknown key `seed`"),
        ("sources: [{source: builtin, weight: 1}]", "unknown key `weight`"),
        ("sources: [{split: train}]", "a source's `source` is `None`"),
        ("sources: [{source: a, split: 3}]", "a source's `split` is `3`"),
        ("sources: [{source: a, share: 0}]", "a `share` is `0`"),
        ("sources: [{source: a, share: true}]", "a `share` is `True`"),
        ("sources: [{source: a, share: .inf}]", "a `share` is `inf`"),
        ("sources: [{source: a, share: .nan}]", "a `share` is `nan`"),
        ("sources: [{source: a, share: 1}, {source: b}]", "others none"),
        ("sources: [{source: a}]\nstream: 3", "`stream` is `3`"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        load_corpus(recipe(tmp_path, text))
    assert "mix.yaml" in caught.value.message


def test_a_part_reads_as_written(tmp_path: Path) -> None:
    path = recipe(tmp_path, "sources:\n- {source: o/n:c, split: s, column: t, share: 2}\n")
    assert read_mix(Path(path)).parts == (Part("o/n:c", "s", "t", 2.0),)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    shares=st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_every_prefix_of_a_blend_holds_the_shares(sizes: list[int], shares: list[int]) -> None:
    shares = shares[: len(sizes)]
    sources = [[Document(i + 1, text=f"{k}") for i in range(size)] for k, size in enumerate(sizes)]
    blended = blend(sources, [float(share) for share in shares])
    for length in range(len(blended) + 1):
        taken = Counter(document.text for document in blended[:length])
        for k, share in enumerate(shares):
            assert abs(taken[str(k)] - length * share / sum(shares)) < len(sizes)
    left = Counter(document.text for document in blended)
    assert any(left[str(k)] == size for k, size in enumerate(sizes)), "it ends only when a source is used up"
