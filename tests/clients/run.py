"""Load artifacts in real engines, on this machine's CPU, and compare each with a twin of its dequantized weights.

    python tests/clients/run.py [CLIENT ...]     # make test-engines does it

Makes an environment for each client in the folder $ENGINES (`.engines`), from clients.toml; they take some 6 GB. Exit
code 1 when an expectation is not met, or a client cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from cases import dequantized, make, windows  # noqa: E402

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Client:
    """An engine in an environment of its own."""

    name: str
    spec: dict[str, Any]
    home: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.home / self.name / "bin" / "python"

    def install(self) -> None:
        """Make the environment, unless the one there was made from the same lines."""
        made = self.home / self.name / ".made"
        wanted = json.dumps({key: self.spec.get(key) for key in ("install", "no_deps", "uninstall")}, sort_keys=True)
        if made.is_file() and made.read_text(encoding="utf-8") == wanted:
            return
        print(f"installing {self.name} into {self.home / self.name}", file=sys.stderr, flush=True)
        shutil.rmtree(self.home / self.name, ignore_errors=True)
        venv.create(self.home / self.name, with_pip=True)
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *self.spec["install"]], check=True)
        if self.spec.get("no_deps"):
            subprocess.run([*pip, "install", "--no-deps", *self.spec["no_deps"]], check=True)
        if self.spec.get("uninstall"):
            subprocess.run([*pip, "uninstall", "--yes", *self.spec["uninstall"]], check=True)
        made.write_text(wanted, encoding="utf-8")

    def run(self, checkpoint: Path, tokens: Path, result: Path, *options: str) -> str:
        """Run the client's script on a checkpoint; returns "" or, where it fails, the end of what it printed."""
        result.unlink(missing_ok=True)
        command = [self.python, HERE / self.spec["script"], checkpoint, tokens, result, *options]
        environment = {**os.environ, **ENVIRONMENT, **self.spec.get("env", {})}
        with open(result.with_suffix(".log"), "w", encoding="utf-8") as log:
            # the result file tells success: engines fail at exit for reasons of their own
            subprocess.run(list(map(str, command)), check=False, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return "" if result.exists() else result.with_suffix(".log").read_text(encoding="utf-8")[-4000:]


@dataclass(frozen=True)
class Line:
    """One expectation, what was found, and whether it is met."""

    client: str
    case: str
    found: str
    met: bool


class Scores:
    """Log-probabilities of the windows by client, dtype and case; each is computed once."""

    def __init__(self, client: Client, cases: dict[str, Path], tokens: Path, dtype: str) -> None:
        self.client, self.cases, self.tokens, self.dtype = client, cases, tokens, dtype
        self.known: dict[str, np.ndarray | str] = {}

    def of(self, case: str) -> np.ndarray | str:
        """[windows, tokens - 1] natural logarithms, or what the client printed last."""
        if case not in self.known:
            result = self.client.home / "work" / f"{self.client.name}-{case.replace(', ', '-').replace(' ', '-')}.json"
            failure = self.client.run(self.cases[case], self.tokens, result, self.dtype)
            self.known[case] = failure or np.array(json.loads(result.read_text(encoding="utf-8")))
        return self.known[case]

    def close(self, case: str, twin: str, ppl: float, nats: float) -> Line:
        """Expect a perplexity within a part `ppl` of the twin's, and sums over a window within `nats`."""
        mine, theirs = self.of(case), self.of(twin)
        if isinstance(mine, str) or isinstance(theirs, str):
            return Line(self.client.name, case, f"failed: {_last(mine if isinstance(mine, str) else theirs)}", False)
        ratio = perplexity(mine) / perplexity(theirs)
        apart = float(np.abs(mine.sum(1) - theirs.sum(1)).max())
        found = f"perplexity {perplexity(mine):.4f}, {ratio - 1:+.3%} of {twin}; a window {apart:.3f} nats apart"
        return Line(self.client.name, case, found, abs(ratio - 1) <= ppl and apart <= nats)

    def equal(self, case: str, other: str) -> Line:
        """Expect the same numbers."""
        mine, theirs = self.of(case), self.of(other)
        same = isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and bool((mine == theirs).all())
        return Line(self.client.name, case, f"log-probabilities {'equal' if same else 'differ from'} {other}'s", same)

    def refused(self, case: str, reason: str) -> Line:
        """Expect a refusal that says `reason`."""
        found = self.of(case)
        met = isinstance(found, str) and reason in found
        return Line(self.client.name, case, f"refused: {reason}" if met else "not refused for that reason", met)

    def ruined(self, case: str, twin: str, factor: float) -> Line:
        """Expect a perplexity of more than `factor` times the other's."""
        mine, theirs = self.of(case), self.of(twin)
        if isinstance(mine, str) or isinstance(theirs, str):
            return Line(self.client.name, case, "failed", False)
        ratio = perplexity(mine) / perplexity(theirs)
        return Line(self.client.name, case, f"perplexity {ratio:,.1f} times that of {twin}", ratio > factor)


def perplexity(scores: np.ndarray) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-scores.mean())


def vllm(client: Client, cases: dict[str, Path], tokens: Path) -> Iterator[Line]:
    """Every format, the cache's scales, and what it refuses."""
    scores = Scores(client, cases, tokens, "float16")
    for case in ("compressed-tensors", "gptq", "awq"):
        yield scores.close(case, "twin", 0.01, 0.5)
    for case in ("gptq", "awq"):
        yield scores.equal(case, "compressed-tensors")
    for case in ("compressed-tensors, asymmetric", "awq, asymmetric"):
        yield scores.close(case, "twin, asymmetric", 0.01, 0.5)
    yield scores.equal("awq, asymmetric", "compressed-tensors, asymmetric")
    yield scores.close("FP8 cache", "compressed-tensors", 0.02, 20.0)
    yield scores.ruined("FP8 cache, planted scales", "FP8 cache", 2.0)
    yield scores.refused("gptq, called asymmetric", "sym=False")


def transformers(client: Client, cases: dict[str, Path], tokens: Path) -> Iterator[Line]:
    """compressed-tensors, in float32: the twin's numbers."""
    scores = Scores(client, cases, tokens, "float32")
    yield scores.close("compressed-tensors", "twin", 0.001, 0.05)
    yield scores.close("compressed-tensors, asymmetric", "twin, asymmetric", 0.001, 0.05)
    yield scores.close("FP8 cache", "compressed-tensors", 0.001, 0.05)


def gptqmodel(client: Client, cases: dict[str, Path], tokens: Path) -> Iterator[Line]:
    """gptq and awq through transformers, in bfloat16, for which GPTQModel has CPU kernels."""
    scores = Scores(client, cases, tokens, "bfloat16")
    yield scores.close("gptq", "twin", 0.01, 10.0)
    yield scores.close("awq, asymmetric", "twin, asymmetric", 0.01, 10.0)


def onnxruntime(client: Client, cases: dict[str, Path], tokens: Path) -> Iterator[Line]:
    """gptq and awq through the model builder: weights equal to those that our independent reader makes."""
    for case in ("gptq", "awq, asymmetric"):
        result = client.home / "work" / f"onnxruntime-{case.replace(', ', '-')}.npz"
        if failure := client.run(cases[case], tokens, result):
            yield Line(client.name, case, f"failed: {_last(failure)}", False)
            continue
        wanted, found = joined(dequantized(cases[case])), np.load(result)
        common = sorted(wanted.keys() & set(found.files))
        apart = max((float(np.abs(wanted[name] - found[name]).max()) for name in common), default=math.inf)
        text = f"{len(common)} of {len(wanted)} linears dequantize to the same, at most {apart:.1e} apart"
        yield Line(client.name, case, text, len(common) == len(wanted) and apart < 1e-6)


def joined(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights with q, k and v of a layer as one, which is how the builder writes them."""
    parts: dict[str, list[np.ndarray]] = {}
    for leaf in ("q_proj", "k_proj", "v_proj"):
        for name in [name for name in weights if name.endswith(leaf)]:
            parts.setdefault(f"{name.rpartition('.')[0]}.qkv_proj", []).append(weights.pop(name))
    return weights | {name: np.concatenate(group) for name, group in parts.items()}


RUNS: dict[str, Callable[[Client, dict[str, Path], Path], Iterator[Line]]] = {
    "vllm": vllm,
    "transformers": transformers,
    "gptqmodel": gptqmodel,
    "onnxruntime": onnxruntime,
}


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing printed")[:200]


def main() -> int:
    """Run the clients that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--model", type=Path, default=Path("demo/smollm2-135m"), help="FP16 checkpoint")
    arguments = parser.parse_args()
    if unknown := set(arguments.clients) - RUNS.keys():
        parser.error(f"no client is called {', '.join(sorted(unknown))}")
    home = Path(os.environ.get("ENGINES", ".engines")).resolve()
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    specs = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
    cases = make(arguments.model.resolve(), work)
    tokens = work / "windows.json"
    tokens.write_text(json.dumps(windows(arguments.model)), encoding="utf-8")
    lines = []
    for name in arguments.clients or RUNS:
        client = Client(name, specs[name], home)
        client.install()
        for line in RUNS[name](client, cases, tokens):
            print(f"{'ok  ' if line.met else 'FAIL'}  {line.client:<13}{line.case:<32}{line.found}", flush=True)
            lines.append(line)
    failed = sum(not line.met for line in lines)
    print(f"{len(lines)} expectations, {failed} not met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
