"""`quantkit quantize` proves what it wrote, and budgets decide the exit code in every output format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from zoo.models import prose

from quantkit.cli.app import run
from quantkit.cli.quantize import Proof
from quantkit.cli.verdicts import formatted
from quantkit.errors import UsageError
from quantkit.report.budgets import Budgets, read_budgets

Zoo = Callable[..., Path]
Make = Callable[..., Any]
Capture = pytest.CaptureFixture[str]
MET = {"option": "max-kl", "said": "KL 1%\nof it", "value": 0.1, "limit": 0.2, "met": True}
MISSED = {"option": "min-top1", "said": 'agrees for 80% <of> "it"', "value": 0.8, "limit": 0.9, "met": False}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(prose(60, seed=9))
    return str(file)


@pytest.fixture
def command(zoo: Zoo, calibration: Path, text: str, tmp_path: Path) -> list[str]:
    source, recipe = str(zoo("llama")), ["--method", "rtn", "--group-size", "32", "--device", "cpu"]
    data = ["--calibration", str(calibration), "--eval-data", text, "--eval-tokens", "120"]
    return ["quantize", source, "-o", str(tmp_path / "out"), *recipe, *data]


def test_a_run_is_measured_and_reported(command: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert run(command) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "out"
    report = json.loads((folder / "report.json").read_text())

    assert out == f"{folder}\n" and f"out: {report['verdict']}" in err
    assert report["measured"]["tokens"] == 118 and report["measured"]["kl"]["mean"] > 0
    assert (folder / "report.html").is_file() and (folder / "README.md").read_text().startswith("---\n")


def test_without_evaluation_nothing_is_added(command: list[str], tmp_path: Path, capsys: Capture) -> None:
    plain = [word for word in command[: command.index("--eval-data")]]

    assert run([*plain, "--no-eval", "--json", "-q"]) == 0

    assert "evaluation" not in json.loads(capsys.readouterr().out)
    assert not {"report.json", "report.html", "README.md"} & {each.name for each in (tmp_path / "out").iterdir()}


def test_a_missed_budget_is_exit_1_and_the_artifact_stays(command: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert run([*command, "--max-kl", "1e-9", "--max-size", "1GB", "-q"]) == 1
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = report["measured"]["kl"]["mean"]

    assert f"error: over budget: `out`: KL {found:.4g} nats per token, allowed 1e-09" in err
    assert out == f"{tmp_path / 'out'}\n" and (tmp_path / "out" / "model.safetensors").is_file()
    assert [each["met"] for each in report["judged"]] == [False, True]
    assert report["verdict"].startswith("Over budget: KL")

    assert run([*command, "--max-kl", str(found), "--overwrite", "--json", "-q"]) == 0
    evaluation = json.loads(capsys.readouterr().out)["evaluation"][0]
    assert evaluation["judged"][0]["met"] and "record" not in evaluation


def test_several_formats_are_measured_in_one_pass(command: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert run([*command, "--format", "gptq", "--format", "compressed-tensors", "--json", "-q"]) == 0

    found = json.loads(capsys.readouterr().out)["evaluation"]
    assert [each["name"] for each in found] == ["gptq", "compressed-tensors"]
    assert found[0]["measured"]["kl"]["mean"] == pytest.approx(found[1]["measured"]["kl"]["mean"], rel=1e-3)
    assert (tmp_path / "out" / "gptq" / "report.html").is_file()


def test_compare_keeps_budgets_too(make_artifact: Make, text: str, capsys: Capture) -> None:
    four, eight = make_artifact("llama", method="rtn"), make_artifact("llama", method="rtn", bits=8)
    command = [
        "eval",
        "compare",
        str(four.source),
        str(four.path),
        str(eight.path),
        "--data",
        text,
        "--window",
        "16",
        "-q",
    ]
    assert run([*command, "--json"]) == 0
    kls = [each["kl"]["mean"] for each in json.loads(capsys.readouterr().out)["results"]]

    between = ["--max-kl", str(sum(kls) / 2)]
    assert run([*command, *between, "--output-format", "github"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert run([*command, *between, "--output-format", "junit"]) == 1
    suite = ElementTree.fromstring(capsys.readouterr().out.split("\n", 1)[1])

    assert [line.partition("::")[2].split()[0] for line in lines] == ["error", "notice"]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.get("classname") for case in suite if case.find("failure") is not None] == [str(four.path)]


def test_github_escapes() -> None:
    assert formatted("github", [("m", [MET, MISSED])]).splitlines() == [
        "::notice title=quantkit max-kl::m: KL 1%25%0Aof it",
        '::error title=quantkit min-top1::m: agrees for 80%25 <of> "it"',
    ]


def test_junit_is_xml_whatever_the_name() -> None:
    suite = ElementTree.fromstring(formatted("junit", [('<a & "b">\x00\n', [MISSED])]).split("\n", 1)[1])

    assert suite[0].get("classname") == '<a & "b">??'
    assert suite[0][0].get("message") == MISSED["said"]


def test_options_without_effect_are_refused() -> None:
    assert Proof.of(True, None, None, Budgets()).options == {}
    assert Proof.of(True, "x.txt", 50, read_budgets("3%")).options == {
        "data": "x.txt",
        "tokens": 50,
        "budgets": Budgets(0.03),
    }
    for given in (("x", None, Budgets()), (None, 9, Budgets()), (None, None, Budgets(kl=1.0))):
        with pytest.raises(UsageError, match="have no effect"):
            Proof.of(False, *given)
    with pytest.raises(UsageError, match="must be at least 2"):
        Proof.of(True, None, 1, Budgets())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--max-kl -1", "`--max-kl` is -1.0"),
        ("--max-perplexity-increase much", "which is no share"),
        ("--min-top1 91", "no share is above 1"),
        ("--max-size big", "`big` is no size"),
        ("--output-format xml", "`--output-format` is `xml`"),
        ("--no-eval --max-kl 1", "`--no-eval` measures nothing"),
    ],
)
def test_limits_that_are_none_are_refused_before_any_work(options: str, error: str, capsys: Capture) -> None:
    assert run(["quantize", "m", "-o", "out", *options.split()]) == 2
    assert error in capsys.readouterr().err
