"""`quantkit quantize`: options to a Recipe, and a run's record to the streams. The run itself is the pipeline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.console import Console
from quantkit.cli.verdicts import OUTPUT_FORMATS, MaxKl, MaxPerplexityIncrease, MaxSize, MinTop1, formatted, over_budget
from quantkit.errors import QuantkitError, UsageError
from quantkit.recipe import (
    DTYPES,
    FORMAT_NAMES,
    INDIVISIBLE,
    KV_CACHES,
    METHOD_NAMES,
    TARGETS,
    Recipe,
    check_choice,
)
from quantkit.report.budgets import Budgets, read_budgets

if TYPE_CHECKING:
    from quantkit.report.results import Result

WHAT, SCHEME, CALIBRATION, RESOURCES, OUTPUT = "What", "Scheme", "Calibration", "Resources", "Output"
EVALUATION = "Evaluation"
_DEFAULTS = Recipe()


def _either(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _option(name: str, help: str, panel: str, metavar: str | None = None) -> Any:
    """Make the option of one Recipe field; its own default is None, so that a recipe file can speak."""
    default = getattr(_DEFAULTS, name.split("/")[0].lstrip("-").replace("-", "_"))
    default = ", ".join(default) if isinstance(default, tuple) else default
    said = "" if default is None or default == "" or isinstance(default, bool) else f" (default {default})"
    return typer.Option(name, help=help + said, rich_help_panel=panel, metavar=metavar)


def _output(*names: str, help: str, metavar: str | None = None) -> Any:
    """Make an option that is no Recipe field."""
    return typer.Option(*names, help=help, rich_help_panel=OUTPUT, metavar=metavar)


Texts = list[str] | None
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder, or a name on the Hugging Face hub")]

Method = Annotated[str | None, _option("--method", _either(METHOD_NAMES), WHAT, "NAME")]
KvCache = Annotated[str | None, _option("--kv-cache", f"Calibrate its scales: {_either(KV_CACHES)}", WHAT, "NAME")]
Target = Annotated[str | None, _option("--target", f"Engine to suit: {_either(TARGETS)}", WHAT, "NAME")]
Tp = Annotated[int | None, _option("--tp", "Its tensor-parallel ranks", WHAT)]
Bits = Annotated[int | None, _option("--bits", "Width of a code, 4 or 8", SCHEME)]
GroupSize = Annotated[int | None, _option("--group-size", "Inputs per scale, or -1: one scale per output", SCHEME)]
Symmetric = Annotated[bool | None, _option("--symmetric/--asymmetric", "Fixed (default) or free zero points", SCHEME)]
Refine = Annotated[int | None, _option("--refine", "Rounds of refinement (default: the method's)", SCHEME)]
Ignore = Annotated[Texts, _option("--ignore", "Linears to keep in 16 bit; repeatable", SCHEME, "PATTERN")]
Override = Annotated[Texts, _option("--override", "'PATTERN: bits=8,group_size=32'; repeatable", SCHEME, "TEXT")]
Indivisible = Annotated[
    str | None, _option("--indivisible", f"If a linear does not fit: {_either(INDIVISIBLE)}", SCHEME, "NAME")
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", help="YAML file of these options; the command line wins", rich_help_panel=WHAT),
]

Calibration = Annotated[str | None, _option("--calibration", "builtin, a file or a dataset", CALIBRATION, "SOURCE")]
Split = Annotated[str | None, _option("--calibration-split", "Split of the dataset", CALIBRATION, "NAME")]
Column = Annotated[str | None, _option("--calibration-column", "Column with the text", CALIBRATION, "NAME")]
Samples = Annotated[int | None, _option("--samples", "Sequences", CALIBRATION)]
SeqLen = Annotated[int | None, _option("--seq-len", "Tokens per sequence", CALIBRATION)]
Seed = Annotated[int | None, _option("--seed", "Seed of every random choice", CALIBRATION)]

Device = Annotated[str | None, _option("--device", "auto, cpu, cuda or cuda:N", RESOURCES, "NAME")]
Dtype = Annotated[str | None, _option("--dtype", f"Of forward passes: {_either(DTYPES)}", RESOURCES, "NAME")]
Trust = Annotated[
    bool | None, _option("--trust-remote-code/--no-trust-remote-code", "Run the checkpoint's own code", RESOURCES)
]

Out = Annotated[Path | None, _output("--out", "-o", help="Folder to write", metavar="FOLDER")]
Format = Annotated[Texts, _option("--format", f"{_either(FORMAT_NAMES)}; repeatable", WHAT, "NAME")]
MaxShardSize = Annotated[str | None, _option("--max-shard-size", "Of one file", OUTPUT, "SIZE")]
Strict = Annotated[bool | None, _option("--strict/--no-strict", "A fallback makes the exit code 1", OUTPUT)]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace what is in the folder")]
Restart = Annotated[bool, _output("--restart", help="Do not go on with an interrupted run")]
DryRun = Annotated[bool, _output("--dry-run", help="Print the plan and stop")]
Evaluate = Annotated[
    bool, typer.Option("--eval/--no-eval", help="Measure the artifact and write a report", rich_help_panel=EVALUATION)
]
EvalData = Annotated[
    str | None,
    typer.Option(help="Text to measure on (default builtin-heldout)", metavar="SOURCE", rich_help_panel=EVALUATION),
]
EvalTokens = Annotated[int | None, typer.Option(help="Tokens of it (default 4096)", rich_help_panel=EVALUATION)]
OutputFormat = Annotated[
    str, _output("--output-format", help=f"Of the result: {_either(OUTPUT_FORMATS)}", metavar="NAME")
]
Json = Annotated[bool, _output("--json", help="Print one JSON object")]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Print errors only")]
Verbose = Annotated[bool, _output("--verbose", help="Print stages and tracebacks")]


def quantize(
    model: Model,
    method: Method = None,
    format: Format = None,
    kv_cache: KvCache = None,
    target: Target = None,
    tp: Tp = None,
    recipe: RecipeFile = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = None,
    refine: Refine = None,
    ignore: Ignore = None,
    override: Override = None,
    indivisible: Indivisible = None,
    calibration: Calibration = None,
    calibration_split: Split = None,
    calibration_column: Column = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = None,
    evaluate: Evaluate = True,
    eval_data: EvalData = None,
    eval_tokens: EvalTokens = None,
    max_perplexity_increase: MaxPerplexityIncrease = None,
    max_kl: MaxKl = None,
    min_top1: MinTop1 = None,
    max_size: MaxSize = None,
    out: Out = None,
    max_shard_size: MaxShardSize = None,
    strict: Strict = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    dry_run: DryRun = False,
    output_format: OutputFormat = "text",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Quantize a model's linear layers; the folder it writes is what engines serve.

    quantkit quantize ./llama-8b -o ./llama-8b-w4

    quantkit quantize ./llama-8b -o ./out --method awq --asymmetric --dry-run

    quantkit quantize ./llama-8b -o ./out --format awq --format gptq --kv-cache fp8 --target sglang
    """
    given = dict(locals())  # nothing but the parameters exists yet
    asked = recipe_of(recipe, {field.name: given[field.name] for field in fields(Recipe)})
    proof = Proof.of(
        evaluate, eval_data, eval_tokens, read_budgets(max_perplexity_increase, max_kl, min_top1, max_size)
    )
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    console = Console.open(quiet=quiet, verbose=verbose)
    if dry_run:
        return _plan(console, asked, model, out, as_json=json)
    if out is None:
        raise UsageError("no output folder is given", "pass `-o FOLDER`, or `--dry-run` to see the plan only")
    style = "json" if json else output_format
    return _run(console, asked, model, out, overwrite=overwrite, restart=restart, proof=proof, style=style)


@dataclass(frozen=True, slots=True)
class Proof:
    """What is to be measured after a run, and the limits.

    Attributes:
        options: of `prove`.
    """

    wanted: bool
    options: dict[str, Any]

    @classmethod
    def of(cls, wanted: bool, data: str | None, tokens: int | None, budgets: Budgets) -> Proof:
        """Read the options.

        Raises:
            UsageError: one of them would have no effect.
        """
        given = {"data": data, "tokens": tokens, "budgets": budgets or None}
        options = {name: value for name, value in given.items() if value is not None}
        if tokens is not None and tokens < 2:
            raise UsageError(f"`--eval-tokens` is {tokens}, and must be at least 2")
        if options and not wanted:
            raise UsageError("`--no-eval` measures nothing, so text and limits for it have no effect", "leave it out")
        return cls(wanted, options)


def recipe_of(path: Path | None, given: dict[str, Any]) -> Recipe:
    """Lay the command line over a recipe file over the defaults; None and empty lists are not given.

    Raises:
        UsageError: the file cannot be read, or a field is out of range.
    """
    base = Recipe.from_yaml(path) if path else Recipe()
    return base.merged(**{name: value for name, value in given.items() if value not in ([], ())}).validate()


def _plan(console: Console, recipe: Recipe, model: str, out: Path | None, *, as_json: bool) -> int:
    from quantkit.plan import make_plan

    with console.progress() as emit:
        plan = make_plan(recipe, model, out, emit)
    console.result(plan.to_json() if as_json else {}, plan.summary(), as_json=as_json)
    return 0


def _run(
    console: Console,
    recipe: Recipe,
    model: str,
    out: Path,
    *,
    overwrite: bool,
    restart: bool,
    proof: Proof,
    style: str,
) -> int:
    from quantkit.pipeline import quantize as run

    with console.progress() as emit:
        record = run(recipe, model, out, overwrite=overwrite, restart=restart, emit=emit)
    for line in record.summary():
        console.line(line)
    results: tuple[Result, ...] = ()
    if proof.wanted:
        from quantkit.report.prove import prove
        from quantkit.report.results import verdict

        with console.progress() as emit:
            results = prove(recipe, model, out, emit=emit, **proof.options)
        for result in results:
            console.line(f"{result.name}: {verdict(result)}")
    folders = [str(folder) for folder in recipe.folders(out).values()]
    if style in ("text", "json"):
        value = record.to_json() if style == "json" else {}
        if value and results:
            value["evaluation"] = [result.evaluation() for result in results]
        console.result(value, folders, as_json=style == "json")
    else:
        console.data(formatted(style, [(result.name, result.judged) for result in results]))
    failed = over_budget(console, [(result.name, result.judged) for result in results])
    if recipe.strict and record.fallbacks:
        count = len(record.fallbacks)
        were = "thing was" if count == 1 else "things were"
        console.error(QuantkitError(f"{count} {were} done in another way than asked, and `--strict` is set"))
        return 1
    return 1 if failed else 0
