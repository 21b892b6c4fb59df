"""The command line: exit code, stdout and stderr together; every option reaches its function."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quantkit import __version__
from quantkit.cli.app import run
from quantkit.errors import CheckpointError, NumericalError, ResourceError, UnsupportedScheme
from quantkit.events import BlockDone, Fallback, Stage
from quantkit.recipe import Recipe

Capture = pytest.CaptureFixture[str]


@dataclass
class Result:
    """Stands in for a Plan, a RunRecord, a Perplexity and an Inspection."""

    lines: list[str]
    fallbacks: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def summary(self) -> list[str]:
        return self.lines


@dataclass
class Library:
    """Stands in for the functions behind the commands, and notes how they were called."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    raises: BaseException | None = None
    proofs: list[tuple[str, Path, dict[str, Any]]] = field(default_factory=list)

    def _note(self, name: str, *given: Any, **named: Any) -> Result:
        self.calls.append((name, given, named))
        if self.raises:
            raise self.raises
        return Result([f"{name} line 1", f"{name} line 2"], self.fallbacks)

    def make_plan(self, recipe: Recipe, model: str, out: Path | None, emit: Any) -> Result:
        return self._note("plan", recipe, model, out)

    def quantize(self, recipe: Recipe, model: str, out: Path, *, emit: Any, **named: bool) -> Result:
        emit(Stage(0, 1, "read"))
        for reason in self.fallbacks:
            emit(Fallback("model.layers.0.mlp.up_proj", reason))
        emit(BlockDone(0, 1, {"model.layers.0.mlp.up_proj": 0.5}, 2.0, 10**9))
        return self._note("quantize", recipe, model, out, **named)

    def prove(self, recipe: Recipe, model: str, out: Path, *, emit: Any, **named: Any) -> tuple[()]:
        self.proofs.append((model, out, named))
        return ()

    def perplexity(self, path: str, *, emit: Any, **named: Any) -> Result:
        return self._note("perplexity", path, **named)

    def inspect(self, path: str, *, trust_remote_code: bool = False) -> Result:
        return self._note("inspect", path, trust_remote_code=trust_remote_code)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    homes = {
        "quantkit.plan": "make_plan",
        "quantkit.pipeline": "quantize",
        "quantkit.report.prove": "prove",
        "quantkit.eval.perplexity": "perplexity",
        "quantkit.inspection": "inspect",
    }
    for module_name, function in homes.items():
        module = ModuleType(module_name)
        setattr(module, function, getattr(fake, function))
        monkeypatch.setitem(sys.modules, module_name, module)
    return fake


OPTIONS: dict[str, tuple[list[str], Any]] = {
    "method": (["--method", "awq+gptq"], "awq+gptq"),
    "bits": (["--bits", "8"], 8),
    "group_size": (["--group-size", "-1"], -1),
    "symmetric": (["--asymmetric"], False),
    "refine": (["--refine", "0"], 0),
    "samples": (["--samples", "7"], 7),
    "seq_len": (["--seq-len", "64"], 64),
    "seed": (["--seed", "3"], 3),
    "calibration": (["--calibration", "text.jsonl"], "text.jsonl"),
    "calibration_split": (["--calibration-split", "test"], "test"),
    "calibration_column": (["--calibration-column", "body"], "body"),
    "ignore": (["--ignore", "o_proj", "--ignore", "re:.*k"], ("o_proj", "re:.*k")),
    "override": (["--override", "a: bits=8", "--override", "b: bits=4"], ("a: bits=8", "b: bits=4")),
    "indivisible": (["--indivisible", "keep"], "keep"),
    "format": (["--format", "awq", "--format", "gptq"], ("awq", "gptq")),
    "kv_cache": (["--kv-cache", "fp8"], "fp8"),
    "target": (["--target", "vllm"], "vllm"),
    "tp": (["--tp", "2", "--target", "vllm"], 2),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "dtype": (["--dtype", "float32"], "float32"),
    "max_shard_size": (["--max-shard-size", "1GiB"], "1GiB"),
    "strict": (["--strict"], True),
    "trust_remote_code": (["--trust-remote-code"], True),
}
BESIDE: dict[str, dict[str, Any]] = {"tp": {"target": "vllm"}}


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_every_recipe_field_is_an_option(name: str, library: Library) -> None:
    arguments, value = OPTIONS[name]

    assert run(["quantize", "m", "-o", "out", *arguments]) == 0

    recipe = Recipe(**{name: value} | BESIDE.get(name, {}))
    assert library.calls == [("quantize", (recipe, "m", Path("out")), {"overwrite": False, "restart": False})]


def test_the_command_line_wins_over_the_recipe_file(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("method: awq\nsamples: 9\nsymmetric: false\nstrict: true\nignore: [a]\n")

    code = run(["quantize", "m", "-o", "out", "--recipe", str(file), "--samples", "10", "--symmetric", "--no-strict"])

    assert code == 0
    assert library.calls[0][1][0] == Recipe(method="awq", samples=10, symmetric=True, strict=False, ignore=("a",))


def test_quantize_prints_the_folder_and_tells_the_rest_on_stderr(library: Library, capsys: Capture) -> None:
    assert run(["quantize", "m", "-o", "a/b", "--overwrite"]) == 0

    assert library.calls[0][2] == {"overwrite": True, "restart": False}
    assert library.proofs == [("m", Path("a/b"), {})]
    assert capsys.readouterr() == (
        "a/b\n",
        "block 1/1  error 0.5000  max 0.5000 (up_proj)  2.0 s  rss 1.0 GB\nquantize line 1\nquantize line 2\n",
    )


def test_quiet_and_json(library: Library, capsys: Capture) -> None:
    assert run(["quantize", "m", "-o", "out", "--quiet", "--json"]) == 0

    out, err = capsys.readouterr()
    assert json.loads(out) == {"lines": ["quantize line 1", "quantize line 2"]}
    assert err == ""


@pytest.mark.parametrize("strict", [False, True])
def test_fallbacks_fail_only_when_strict(strict: bool, library: Library, capsys: Capture) -> None:
    library.fallbacks = ["damping raised to 0.1"]

    code = run(["quantize", "m", "-o", "out", *(["--strict"] if strict else [])])

    out, err = capsys.readouterr()
    assert code == int(strict)
    assert out == "out\n"
    assert "warning: model.layers.0.mlp.up_proj: damping raised to 0.1\n" in err
    said = err.endswith("error: 1 thing was done in another way than asked, and `--strict` is set\n")
    assert said is strict


def test_a_dry_run_prints_the_plan_and_needs_no_folder(library: Library, capsys: Capture) -> None:
    assert run(["quantize", "m", "--dry-run"]) == 0
    assert capsys.readouterr() == ("plan line 1\nplan line 2\n", "")
    assert run(["quantize", "m", "-o", "out", "--dry-run", "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {"lines": ["plan line 1", "plan line 2"]}
    assert [call[1] for call in library.calls] == [(Recipe(), "m", None), (Recipe(), "m", Path("out"))]


def test_perplexity(library: Library, capsys: Capture) -> None:
    assert run(["eval", "perplexity", "m"]) == 0

    defaults = {
        "kv_cache": None,
        "data": "builtin-heldout",
        "split": None,
        "column": None,
        "window": 512,
        "stride": None,
        "max_tokens": None,
        "dtype": "float32",
        "device": "auto",
        "trust_remote_code": False,
    }
    assert library.calls == [("perplexity", ("m",), defaults)]
    assert capsys.readouterr() == ("perplexity line 1\nperplexity line 2\n", "")


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["--kv-cache", "fp8"], {"kv_cache": "fp8"}),
        (["--data", "x.txt"], {"data": "x.txt"}),
        (["--split", "test"], {"split": "test"}),
        (["--column", "body"], {"column": "body"}),
        (["--window", "64"], {"window": 64}),
        (["--stride", "32"], {"stride": 32}),
        (["--max-tokens", "100"], {"max_tokens": 100}),
        (["--dtype", "float32"], {"dtype": "float32"}),
        (["--device", "cpu"], {"device": "cpu"}),
        (["--trust-remote-code"], {"trust_remote_code": True}),
    ],
)
def test_every_perplexity_option_arrives(arguments: list[str], changed: dict[str, Any], library: Library) -> None:
    assert run(["eval", "perplexity", "m"]) == 0
    assert run(["eval", "perplexity", "m", *arguments]) == 0

    assert library.calls[1][2] == library.calls[0][2] | changed


def test_inspect(library: Library, capsys: Capture) -> None:
    assert run(["inspect", "m", "--json", "--trust-remote-code"]) == 0

    assert library.calls == [("inspect", ("m",), {"trust_remote_code": True})]
    assert json.loads(capsys.readouterr().out)["lines"] == ["inspect line 1", "inspect line 2"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("", "missing command", "see `quantkit --help`"),
        ("eval", "missing command", "see `quantkit eval --help`"),
        ("quantise m", "no such command `quantise`", "did you mean `quantize`?"),
        ("--nope", "unknown option `--nope`", "see `quantkit --help`"),
        ("quantize", "missing argument `MODEL`", "see `quantkit quantize --help`"),
        ("quantize m", "no output folder is given", "pass `-o FOLDER`, or `--dry-run` to see the plan only"),
        ("quantize m --metod awq", "unknown option `--metod`", "did you mean `--method`?"),
        (
            "quantize m --method gtpq",
            "`--method` is `gtpq`, which is not known",
            "did you mean `gptq`? The choices are rtn, gptq, awq, awq+gptq, none",
        ),
        ("quantize m --bits 3", "3 bits are not supported", "choose one of 4, 8"),
        ("quantize m --samples 0", "`--samples` is 0, and must be at least 1", ""),
        ("quantize m --recipe none.yaml", "recipe `none.yaml` cannot be read: No such file or directory", ""),
        (
            "eval perplexity m --dtype int8",
            "`--dtype` is `int8`, which is not known",
            "choose one of auto, float32, bfloat16",
        ),
        ("eval perplexity m --device gpu", "`--device gpu` is no device", "use auto, cpu, cuda or cuda:N"),
        ("eval perplexity m --window 1", "`--window` is 1, and must be at least 2", ""),
        (
            "eval perplexity m --window 8 --stride 9",
            "`--stride` is 9, more than the window of 8, so tokens would be skipped",
            "",
        ),
    ],
)
def test_a_command_line_that_cannot_be_used(
    arguments: str, error: str, hint: str, library: Library, capsys: Capture
) -> None:
    code = run(arguments.split())

    assert (code, *capsys.readouterr()) == (2, "", f"error: {error}\n" + (f"\nhint: {hint}\n" if hint else ""))
    assert library.calls == []


def test_a_value_of_another_type_names_the_option(capsys: Capture) -> None:
    assert run(["quantize", "m", "--bits", "four"]) == 2

    assert capsys.readouterr().err.startswith("error: invalid value for `--bits`: ")


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("problem", "code", "error"),
    [
        (
            CheckpointError("`a` is missing", "download it again"),
            2,
            "error: `a` is missing\n\nhint: download it again\n",
        ),
        (UnsupportedScheme("no"), 2, "error: no\n"),
        (NumericalError("no"), 2, "error: no\n"),
        (ResourceError("no disk"), 3, "error: no disk\n"),
        (OSError(28, "No space left on device", "x/y"), 3, "error: no space left for `x/y`\n"),
        (OSError(24, "Too many open files", "x"), 3, "error: too many open files\n\nhint: raise `ulimit -n`"),
        (MemoryError(), 3, "error: out of memory\n"),
        (OutOfMemoryError("CUDA"), 3, "error: out of memory\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n\nhint: repeat the same command"),
        (
            ValueError("a\n b"),
            70,
            "error: unexpected ValueError: a b\n\nhint: this is a bug in quantkit; please report",
        ),
    ],
)
def test_every_failure_has_its_exit_code_and_no_traceback(
    problem: BaseException, code: int, error: str, library: Library, capsys: Capture
) -> None:
    library.raises = problem

    assert run(["quantize", "m", "-o", "out", "--quiet"]) == code

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(error)
    assert "Traceback" not in err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_traceback_is_printed_when_asked_for(
    how: str, library: Library, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.raises = ValueError("boom")
    if how == "environment":
        monkeypatch.setenv("QUANTKIT_DEBUG", "1")

    assert run(["inspect", "m", *(["--verbose"] if how == "option" else [])]) == 70

    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_version(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"quantkit {__version__}\n", "")


@pytest.mark.parametrize("command", [[], ["quantize"], ["inspect"], ["eval"], ["eval", "perplexity"]])
def test_help(command: list[str], capsys: Capture) -> None:
    assert run([*command, "--help"]) == 0

    out, err = capsys.readouterr()
    out = re.sub(r"\x1b\[[\d;]*m", "", out)  # typer colours its help where a CI variable asks for it
    assert f"Usage: {' '.join(['quantkit', *command])} " in out
    assert err == ""


def test_the_help_of_quantize_has_its_panels_in_order(capsys: Capture) -> None:
    run(["quantize", "--help"])

    out = capsys.readouterr().out
    places = [out.index(f" {panel} ─") for panel in ("What", "Calibration", "Resources", "Output")]
    assert places == sorted(places)


def test_help_is_quick_and_loads_no_model_code() -> None:
    script = (
        "import resource, sys\n"
        "from quantkit.cli.app import run\n"
        "code = run(['--help'])\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy', 'datasets', 'yaml') if name in sys.modules]\n"
        "print(code, usage.ru_utime + usage.ru_stime, heavy, file=sys.stderr)\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    code, seconds, heavy = done.stderr.split(maxsplit=2)
    assert (code, heavy.strip()) == ("0", "[]")
    assert float(seconds) < 0.5


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(
        "import sys\n"
        "from types import ModuleType, SimpleNamespace\n"
        "module = ModuleType('quantkit.inspection')\n"
        "found = SimpleNamespace(summary=lambda: ['line'] * 100_000, to_json=dict)\n"
        "module.inspect = lambda path, trust_remote_code: found\n"
        "sys.modules['quantkit.inspection'] = module\n"
        "from quantkit.cli.app import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "fake.py"), "inspect", "m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout and process.stderr
    assert process.stdout.readline() == "line\n"
    process.stdout.close()

    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 0
    process.stderr.close()


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "quantkit", "quantize"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: missing argument `MODEL`\n\nhint: see `quantkit quantize --help`\n"
