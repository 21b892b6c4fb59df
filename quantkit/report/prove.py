"""Evaluate what a run wrote on text it never saw, and put the report and the model card beside the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from quantkit.checkpoint.hub import resolve_model
from quantkit.checkpoint.locate import read_json_object
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedScheme, UsageError
from quantkit.eval.compare import Divergence, compare
from quantkit.events import Emit, Note, ignore
from quantkit.recipe import Recipe
from quantkit.report.budgets import Budgets, judge
from quantkit.report.card import BASE_CARD, model_card
from quantkit.report.overlap import SPAN, shared_share
from quantkit.report.page import render
from quantkit.report.results import RECORD_FILE, REPORT_HTML, REPORT_JSON, Result
from quantkit.weights import WeightSource

HELDOUT = "builtin-heldout"
EVAL_TOKENS = 4096
_WINDOW = 512
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def prove(
    recipe: Recipe,
    model: str,
    out: Path,
    *,
    evaluate: bool = True,
    data: str = HELDOUT,
    tokens: int = EVAL_TOKENS,
    budgets: Budgets | None = None,
    emit: Emit = ignore,
) -> tuple[Result, ...]:
    """Measure the artifacts of a run against their source, judge them, and write report and card into each.

    Args:
        recipe: of the run.
        model: its source.
        out: its folder.
        evaluate: measure; without it the report says that nothing was.
        data: text to measure on; what it shares with the calibration rows is noted in the report.
        tokens: of that text.
        emit: told what happens, and why nothing could be measured.

    Returns:
        The result of every format, in the order of the recipe.

    Raises:
        NumericalError: an artifact's logits are not finite.
        QuantkitError: nothing could be measured, and a budget needs it. The artifacts are kept.
    """
    budgets = budgets or Budgets()
    folders, notes = recipe.folders(out), []
    found: dict[str, Divergence] = {}
    if evaluate:
        try:
            found = _measure(recipe, model, list(folders.values()), data, tokens, emit)
            notes += _overlap_note(recipe, model, data, tokens)
        except (CheckpointError, UnsupportedScheme, UsageError) as problem:
            if budgets.needs_evaluation:
                raise
            notes.append(f"Its quality could not be measured: {problem.message}.")
        for note in notes:
            emit(Note(note))
    results = []
    for folder in folders.values():
        source = WeightSource.open(folder)
        measured = found.get(str(folder))
        judged = judge(budgets, measured, source.checkpoint.nbytes)
        record = read_json_object(folder / RECORD_FILE)
        result = Result.of(folder.resolve().name, record, measured, source.bytes_by_kind(), judged, notes)
        write_report(folder, result, model)
        results.append(result)
    return tuple(results)


def write_report(folder: Path, result: Result, model: str = "") -> None:
    """Write report.json, report.html and README.md into an artifact.

    Raises:
        CheckpointError: a file cannot be written.
    """
    card = folder / "README.md"
    try:
        if card.is_file() and not (folder / REPORT_JSON).exists():  # the source's own
            os.replace(card, folder / BASE_CARD)
        base = folder / BASE_CARD
        said = base.read_text("utf-8", errors="replace") if base.is_file() else ""
        files = {
            REPORT_JSON: json.dumps(result.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
            REPORT_HTML: render([result]),
            "README.md": model_card(result, said, model),
        }
        for name, content in files.items():
            write_text(folder / name, content)
    except OSError as problem:
        raise CheckpointError(
            f"the report of `{folder}` cannot be written: {problem.strerror}", "the artifact itself is complete"
        ) from problem


def write_text(path: Path, content: str) -> None:
    """Write a file so that it is there complete, or as it was."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content, encoding="utf-8", newline="\n")
    os.replace(partial, path)


def _measure(
    recipe: Recipe, model: str, folders: Sequence[Path], data: str, tokens: int, emit: Emit
) -> dict[str, Divergence]:
    """{folder: how far its artifact is from the source}, all in one pass."""
    found = compare(
        folders,
        reference=model,
        data=data,
        max_tokens=tokens,
        window=_window(model),
        device=recipe.device,
        trust_remote_code=recipe.trust_remote_code,
        emit=emit,
    )
    return {each.path: each for each in found.results}


def _window(model: str) -> int:
    """512 tokens, or as many as the model has positions for."""
    config = read_json_object(resolve_model(model) / "config.json")
    limits = [value for name in _POSITIONS if isinstance(value := config.get(name), int) and value > 1]
    return min([_WINDOW, *limits])


def _overlap_note(recipe: Recipe, model: str, data: str, tokens: int) -> list[str]:
    """A sentence where text that was measured on was calibrated on."""
    try:
        share = shared_share(recipe, resolve_model(model), data, tokens)
    except QuantkitError as problem:
        return [f"Whether calibration and evaluation share text is not known: {problem.message}."]
    if not share:
        return []
    return [
        f"{share:.1%} of the evaluated passages of {SPAN} tokens are in the calibration rows as well: the figures"
        " flatter the artifact. Evaluate on other text."
    ]
