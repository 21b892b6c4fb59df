"""Checkpoints and artifacts that many tests read; each is made once a session, when it is first asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Made:
    """An artifact and the record of its making."""

    source: Path
    path: Path
    record: Any


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`zoo(architecture, **config)`: a tiny checkpoint, not to be modified."""
    from zoo import models

    known: dict[str, Path] = {}

    def make(architecture: str, **changes: Any) -> Path:
        key = json.dumps([architecture, changes])
        if key not in known:
            known[key] = models.write(architecture, tmp_path_factory.mktemp(architecture) / "model", **changes)
        return known[key]

    return make


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows of 9 to 20 tokens, as token numbers."""
    from zoo import models

    file = tmp_path_factory.mktemp("calibration") / "rows.jsonl"
    lengths = (20, 12, 17, 12, 9, 20, 16, 20)
    file.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in models.rows(*lengths)))
    return file


@pytest.fixture(scope="session")
def make_artifact(
    tmp_path_factory: pytest.TempPathFactory, zoo: Callable[..., Path], calibration: Path
) -> Callable[..., Made]:
    """`make_artifact(architecture, **recipe)`: an artifact, not to be modified."""
    from quantkit.pipeline import quantize
    from quantkit.recipe import Recipe

    known: dict[str, Made] = {}
    usual = {"group_size": 32, "samples": 8, "seq_len": 20, "dtype": "float32", "device": "cpu"}

    def make(architecture: str, **given: Any) -> Made:
        key = json.dumps([architecture, given])
        if key not in known:
            out = tmp_path_factory.mktemp("artifact") / architecture
            recipe = Recipe().merged(**usual | {"calibration": str(calibration)} | given).validate()
            source = zoo(architecture)
            known[key] = Made(source, out, quantize(recipe, str(source), out))
        return known[key]

    return make
