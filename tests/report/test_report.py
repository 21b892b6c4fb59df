"""The page, its twin, the card and the limits: from results by hand, hostile names, and a real artifact."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from zoo.models import prose

from quantkit.cli.app import run
from quantkit.errors import CheckpointError, UsageError
from quantkit.eval.compare import kl
from quantkit.report.budgets import Budgets, judge, read_budgets
from quantkit.report.card import BASE_CARD, model_card
from quantkit.report.overlap import shared, shared_share
from quantkit.report.page import render
from quantkit.report.prove import prove, write_report
from quantkit.report.results import Result, verdict

Make = Callable[..., Any]
Capture = pytest.CaptureFixture[str]
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "line", "rect", "circle", "polyline", "img", "br"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(90, seed=5))
    return str(file)


@pytest.fixture
def made(make_artifact: Make, tmp_path: Path) -> Any:
    """A copy of an artifact that may be written to."""
    found = make_artifact("llama", method="rtn")
    path = Path(shutil.copytree(found.path, tmp_path / "model-w4"))
    return replace(found, path=path)


@pytest.fixture
def result(made: Any, text: str) -> Result:
    recipe = made.record.plan.recipe
    return prove(recipe, str(made.source), made.path, data=text, tokens=200)[0]


class Reading(HTMLParser):
    """Tags that are opened and closed, and the text of the JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.json = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.json += data


def reading(page: str) -> Reading:
    found = Reading()
    found.feed(page)
    assert found.open == []
    return found


def test_the_page_is_one_file_without_script_or_network(result: Result) -> None:
    page = render([result])

    found = reading(page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.tags}
    assert not [attrs for _, attrs in found.tags if {"src", "href", "onload"} & attrs.keys()]
    assert "default-src 'none'" in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page and "@media print" in page


def test_the_page_holds_its_json(result: Result) -> None:
    assert json.loads(reading(render([result])).json) == result.to_json()
    assert json.loads(reading(render([result, result])).json) == [result.to_json()] * 2


def test_the_pictures_are_well_formed_and_described(result: Result) -> None:
    pictures = re.findall(r"<svg.*?</svg>", render([result]))

    assert len(pictures) == 4
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.find("title") is not None and (root.findtext("desc") or "") != ""
        for element in root.iter():
            for name in ("x", "y", "width", "height", "cx", "cy"):
                assert 0 <= float(element.get(name, 0)) <= 360
    worst = max(result.record["linears"], key=lambda name: result.record["linears"][name]["error"])
    assert f"The worst linear is {worst}" in render([result])


def test_hostile_names_stay_text(result: Result) -> None:
    record = copy.deepcopy(dict(result.record))
    record["source"]["name"] = HOSTILE
    record["fallbacks"] = [{"name": HOSTILE, "reason": HOSTILE}]
    record["linears"] = {f"model.layers.0.{HOSTILE}": {"error": 0.9, "scheme": HOSTILE, "tokens": 1}}
    measured = copy.deepcopy(dict(result.measured)) | {"data": HOSTILE}
    bad = replace(result, name=HOSTILE, record=record, measured=measured, notes=(HOSTILE,))

    page = render([bad, bad])

    found = reading(page)
    assert "<script" not in page and not {"script", "img"} & {tag for tag, _ in found.tags}
    assert json.loads(found.json)[0] == bad.to_json()
    card = model_card(bad)
    assert (
        "<script" not in card.replace("\\<script", "") and yaml.safe_load(card.split("---")[1])["tags"][0] == "quantkit"
    )


def test_the_table_says_what_was_measured(result: Result, made: Any, text: str) -> None:
    found = kl(made.path, made.source, data=text, max_tokens=200, window=64, device="cpu")

    page = render([result])

    assert result.measured["kl"]["mean"] == found.kl.mean  # a window of 64: the model has no more positions
    assert f"{found.perplexity:.3f}" in page and f"{found.kl.mean:.3g} ± {found.kl.stderr:.2g}" in page
    assert f"{found.perplexity_ratio - 1:+.2%} ± " in page and "float16 noise" in page


def test_what_was_not_measured_is_said(made: Any) -> None:
    result = Result.read(made.path)

    page = render([result])
    assert "Its quality was not measured." in page and "not measured" in verdict(result)
    assert len(re.findall("<svg", page)) == 2  # errors of the run and bytes
    assert not re.search(r"\b(nan|None)\b", page)


def test_an_artifact_gets_all_three_and_keeps_the_card_of_its_source(made: Any, text: str) -> None:
    base = "---\nlicense: mit\nlanguage: [en]\nmodel-index: []\n---\n# Base\n"
    (made.path / "README.md").write_text(base)

    for _ in range(2):  # again: its own card is not taken for the source's
        prove(made.record.plan.recipe, str(made.source), made.path, data=text, tokens=100)

    card = (made.path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (made.path / BASE_CARD).read_text() == base
    assert front["license"] == "mit" and front["language"] == ["en"] and "model-index" not in front
    assert front["tags"] == ["quantkit", "rtn", "compressed-tensors"] and "base_model" not in front
    assert Result.read(made.path).to_json() == json.loads((made.path / "report.json").read_text())
    assert (made.path / "report.html").read_text() == render([Result.read(made.path)])
    assert run(["verify", str(made.path), "-q"]) == 0


def test_a_conversion_leaves_the_old_report_behind(made: Any, text: str, tmp_path: Path) -> None:
    (made.path / "README.md").write_text("# Base\n")
    prove(made.record.plan.recipe, str(made.source), made.path, data=text, tokens=100)

    assert run(["convert", str(made.path), "-o", str(tmp_path / "gptq"), "--format", "gptq", "-q"]) == 0

    names = {each.name for each in (tmp_path / "gptq").iterdir()}
    assert not {"report.json", "report.html", "README.md"} & names and BASE_CARD in names


def test_a_hub_name_is_the_base_model(result: Result) -> None:
    front = yaml.safe_load(model_card(result, model="owner/model-1").split("---")[1])

    assert front["base_model"] == "owner/model-1" and front["base_model_relation"] == "quantized"


@pytest.mark.parametrize("card", ["", "# no block", "---\n[\n---\n", "---\n- a\n---\n"])
def test_a_card_that_is_none_gives_nothing(result: Result, card: str) -> None:
    assert set(yaml.safe_load(model_card(result, card).split("---")[1])) == {"library_name", "tags"}


def test_text_that_was_calibrated_on_is_noted(made: Any, text: str) -> None:
    recipe = made.record.plan.recipe.merged(calibration=text, samples=4, seq_len=64)
    notes: list[Any] = []

    result = prove(recipe, str(made.source), made.path, data=text, tokens=200, emit=notes.append)[0]

    assert any("flatter" in note for note in result.notes) and "flatter" in render([result])
    assert any("flatter" in getattr(note, "message", "") for note in notes)
    assert shared_share(recipe.merged(calibration="builtin"), made.source, "builtin-heldout", 500) == 0


def test_shared_passages_by_hand() -> None:
    ids = torch.arange(100, 140)

    assert shared(ids, [torch.arange(0, 50), torch.arange(90, 130)], span=10) == pytest.approx(21 / 31)
    assert shared(ids, [torch.arange(99, 0, -1)], span=10) == 0
    assert shared(ids[:5], [ids], span=10) == 0 and shared(ids, [], span=10) == 0


def test_what_cannot_be_measured_is_noted_unless_a_budget_needs_it(made: Any) -> None:
    recipe = made.record.plan.recipe

    result = prove(recipe, str(made.source), made.path, data="no-such-file.txt")[0]
    assert "could not be measured" in result.notes[0] and not result.measured
    with pytest.raises(UsageError, match=r"no-such-file\.txt"):
        prove(recipe, str(made.source), made.path, data="no-such-file.txt", budgets=Budgets(kl=1.0))
    assert (made.path / "report.html").is_file()


def test_limits_are_read() -> None:
    assert read_budgets("3%", 0.05, "0.9", "1GB") == Budgets(0.03, 0.05, 0.9, 10**9)
    assert read_budgets("0.03", None, "90%") == Budgets(0.03, None, 0.9)
    assert not read_budgets() and read_budgets(max_size="1GB") and not read_budgets(max_size="1GB").needs_evaluation
    for wrong in (("x",), ("3%", -1.0), (None, None, "2"), (None, None, None, "big"), (None, float("nan"))):
        with pytest.raises(UsageError):
            read_budgets(*wrong)


def test_limits_are_kept_at_the_value_and_missed_below_it(made: Any, text: str) -> None:
    found = kl(made.path, made.source, data=text, max_tokens=200, window=64, device="cpu")
    increase = found.perplexity_ratio - 1
    at = Budgets(increase, found.kl.mean, found.kl.top1, found.bytes_on_disk)
    below = Budgets(increase - 1e-9, found.kl.mean * 0.999, found.kl.top1 + 1e-9, found.bytes_on_disk - 1)

    assert [each.met for each in judge(at, found, found.bytes_on_disk)] == [True] * 4
    assert [each.met for each in judge(below, found, found.bytes_on_disk)] == [False] * 4
    assert [each.option for each in judge(below, None, 1)] == ["max-size"]
    nan = replace(found, kl=replace(found.kl, mean=float("nan")))
    judged = judge(Budgets(kl=1e9), nan, 1)[0]
    assert not judged.met and judged.to_json()["value"] is None


def test_the_verdict_names_the_limit(result: Result) -> None:
    met = {"option": "max-kl", "said": "KL 0.1 nats per token, allowed 0.2", "value": 0.1, "limit": 0.2, "met": True}

    assert verdict(result).endswith("no budget was set.")
    assert verdict(replace(result, judged=(met,))).startswith("Within budget: KL 0.1 nats")
    assert verdict(replace(result, judged=(met | {"met": False},))).startswith("Over budget: KL 0.1 nats")
    assert 'class="verdict missed"' in render([replace(result, judged=(met | {"met": False},))])


def test_the_command_compares_artifacts(made: Any, result: Result, tmp_path: Path, capsys: Capture) -> None:
    other = Path(shutil.copytree(made.path, tmp_path / "other"))
    write_report(other, replace(result, name="other"))
    page = tmp_path / "both.html"

    assert run(["report", str(made.path), str(other), "-o", str(page)]) == 0

    out, err = capsys.readouterr()
    assert out == f"{page}\n" and "other: " in err
    assert "2 quantized models" in page.read_text() and page.read_text().count("<svg") == 8
    assert run(["report", str(tmp_path)]) == 2
    assert "has neither `report.json` nor `quantkit.json`" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", '{"report_version": 1}', '{"report_version": 99, "record": {}}', "["])
def test_a_foreign_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)

    with pytest.raises(CheckpointError):
        Result.read(tmp_path)
