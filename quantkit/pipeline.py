"""The main path: stream a checkpoint through one method, one decoder block in memory at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.artifact import Artifact
from quantkit.blocks.block import Block
from quantkit.blocks.kvcache import CacheObserver, find_attentions
from quantkit.blocks.probe import Prober
from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.blocks.stream import Stream
from quantkit.checkpoint.outdir import require_writable_target
from quantkit.checkpoint.output import OutputDirectory
from quantkit.checkpoint.reader import Checkpoint, check_finite
from quantkit.checkpoint.sidecars import copy_sidecars
from quantkit.data.corpus import load_corpus
from quantkit.data.tokens import load_tokenizer, tokenize
from quantkit.device import choose_device, choose_dtype, current_rss
from quantkit.events import BlockDone, Emit, Fallback, Note, Stage, ignore
from quantkit.formats.kv_cache import sglang_files
from quantkit.group import LinearGroup
from quantkit.methods import METHODS
from quantkit.methods.base import Method
from quantkit.methods.refine import refine
from quantkit.methods.rtn import rtn_round
from quantkit.ops.stats import InputStats
from quantkit.plan import Plan, make_plan
from quantkit.progress import Progress
from quantkit.qweight import QuantizedWeight
from quantkit.recipe import Recipe, parse_size
from quantkit.record import RunRecord
from quantkit.verify import require_verified
from quantkit.working import WorkingBlock

# numerics: 4-bit codes cost a few percent at most; a linear that misses by more stopped being itself
LOST = 0.5
RECIPE_FILE, RECORD_FILE = "quantkit-recipe.yaml", "quantkit.json"


def quantize(
    recipe: Recipe,
    model: str,
    out: Path | str,
    *,
    overwrite: bool = False,
    restart: bool = False,
    emit: Emit = ignore,
) -> RunRecord:
    """Quantize a checkpoint and write the artifact, or go on with a run that was interrupted.

    Args:
        model: a checkpoint directory, or a name on the Hugging Face hub.
        out: the directory to write; it appears complete and verified, or not at all. Several formats have a folder each
            in it.
        overwrite: replace a model that is there.
        restart: start over where an interrupted run could go on.
        emit: told what happens.

    Returns:
        The record of the run, which is also written to each artifact.

    Raises:
        QuantkitError: of a kind that says what was wrong. Nothing is left behind but, where the same command may
            succeed later, what was finished.
    """
    out, recipe = Path(out), recipe.validate()
    device = choose_device(recipe.device)
    plan = make_plan(recipe, model, out)
    source = plan.source
    skeleton = build_skeleton(source.path, source.tensors, device=device, trust_remote_code=recipe.trust_remote_code)
    plan = plan.keeping(_no_linears(plan, skeleton))
    if recipe.kv_cache is not None:
        plan = plan.caching(find_attentions(skeleton))
    record = RunRecord(plan, str(device), str(choose_dtype(recipe.dtype, device)).removeprefix("torch."))
    emit = record.collecting(emit)
    for fallback in plan.fallbacks:
        emit(fallback)

    require_writable_target(out, overwrite=overwrite, source=source.path)
    rows = _calibration_rows(recipe, source, record, emit)
    with OutputDirectory(out, overwrite=overwrite, source=source.path) as output:
        progress = Progress.open(output, plan, record, restart=restart)
        if progress.done:
            emit(Note(f"going on after block {progress.done} of {plan.blocks}: an interrupted run got so far"))
        with progress.explained():
            artifacts = _open_artifacts(plan, output)
            if not progress.done:
                _require_finite(source)
            quantize_checkpoint(plan, skeleton, rows, artifacts, record, progress, device=device, emit=emit)
            for artifact in artifacts:
                _write_files(plan, skeleton, artifact, record)
                sealed = artifact.writer.seal()
                record.verdict = require_verified(sealed, source.path, trust_remote_code=recipe.trust_remote_code)
            output.commit()
    return record


@torch.no_grad()
def quantize_checkpoint(
    plan: Plan,
    skeleton: Skeleton,
    rows: tuple[Tensor, ...],
    artifacts: Sequence[Artifact],
    record: RunRecord,
    progress: Progress,
    *,
    device: torch.device,
    emit: Emit = ignore,
) -> None:
    """Stream the checkpoint through the method, one decoder block in memory at a time, and write every artifact.

    Args:
        rows: calibration tokens, int64 [T_i] each.
        record: gets the error of every linear and the fate of every fold.
        progress: where an earlier run was interrupted; told of every finished block.
    """
    method, source = METHODS[plan.recipe.method], plan.source
    rounds = method.refine_rounds if plan.recipe.refine is None else plan.recipe.refine
    dtype = choose_dtype(plan.recipe.dtype, device)
    outer = {n: source.read([tensor])[tensor].to(device, dtype) for n, tensor in skeleton.embedding().items()}
    stream, prober = Stream.embed(skeleton, outer, rows, reference=method.tunes), Prober(skeleton, outer)
    del outer
    progress.restore(artifacts, record, stream)
    for artifact in () if progress.done else artifacts:
        artifact.write({}, source, sorted(set(source.tensors) - skeleton.inside()))
    for block in skeleton.blocks[: progress.done] if plan.packed else ():
        prober.probe(block, WorkingBlock(plan, block, device, dtype).float32)  # later blocks share what it finds

    for block in skeleton.blocks[progress.done :]:
        started, stage = time.monotonic(), _stages(block, skeleton, emit)

        stage("read")
        work = WorkingBlock(plan, block, device, dtype)
        groups = prober.probe(block, work.float32).groups if work.schemes else ()

        stage("observe")
        stats = block.observe(work.compute(), stream.inputs(block), groups, device)

        stage("rescale")  # preserves the block's function
        for group in filter(work.can_fold, groups):
            s = method.rescale(
                group, work.linears(group), stats[group], work.schemes, work.scale_dtype, work.loss(group, stream)
            )
            if s is not None:
                stats[group] = stats[group].rescaled(work.fold(group, s))
            record.add_fold(block.path, group, applied=s is not None)

        stage("round")
        quantized, damps = _round(work, method, groups, stats, rounds, emit)
        if method.tunes:
            stage("tune")
            stream.advance_reference(block, work.compute())
            quantized = method.tune(work.packable(), quantized, work.examples(stream))
        errors = _account(work, groups, stats, quantized, damps, record)
        _tell_lost(errors, emit)
        del stats  # the largest part; neither this block's output nor the next block needs it

        stage("advance")  # later blocks see the error of earlier ones, and so does the cache
        cache = CacheObserver() if plan.attentions else None
        stream.advance(block, work.compute(quantized), cache)

        stage("write")
        record.rewritten += work.write(artifacts, quantized)
        if cache is not None:
            _write_cache_scales(plan, block, cache, artifacts, record)
        del work, quantized  # the next block must find their memory free
        progress.finished(block.index, artifacts, record, stream)
        emit(BlockDone(block.index, len(skeleton.blocks), errors, time.monotonic() - started, current_rss()))


def _round(
    work: WorkingBlock,
    method: Method,
    groups: tuple[LinearGroup, ...],
    stats: Mapping[LinearGroup, InputStats],
    rounds: int,
    emit: Emit,
) -> tuple[dict[str, QuantizedWeight], dict[str, float | None]]:
    """Round and refine every linear of a block that the plan packs; also the damping that each took."""
    quantized: dict[str, QuantizedWeight] = {}
    damps: dict[str, float | None] = {}
    for group in groups:
        weights, seen = work.linears(group), stats[group]
        if not weights:
            continue
        if len({work.schemes.get(name) for name in group.names}) > 1:
            names = ", ".join(group.names)
            emit(
                Note(
                    f"{names} share an input but not a scheme: an engine that fuses some of them may refuse to load it"
                )
            )
        rounding = method.round(weights, seen, work.schemes, work.scale_dtype)
        if rounding.fallback:
            emit(Fallback(f"{work.block.path}.{'|'.join(weights)}", rounding.fallback))
        for name, weight in weights.items():
            quantized[name] = refine(weight, rounding.weights[name], seen.hessian, rounds)
            damps[name] = rounding.damp
    for name, weight in work.unreached(groups).items():
        emit(Fallback(work.full_name(name), "no token reached it: rounded to nearest without calibration"))
        quantized[name] = rtn_round(weight, None, work.schemes[name], work.scale_dtype)
    return quantized, damps


def _account(
    work: WorkingBlock,
    groups: tuple[LinearGroup, ...],
    stats: Mapping[LinearGroup, InputStats],
    quantized: Mapping[str, QuantizedWeight],
    damps: Mapping[str, float | None],
    record: RunRecord,
) -> dict[str, float]:
    """Record the output error of every rounded linear; returns {full name: error}."""
    seen = {name: stats[group] for group in groups for name in group.names}
    return {
        full: record.add_linear(full, q, work.packable_weight(name), seen.get(name), damps.get(name))
        for name, q in quantized.items()
        for full in [work.full_name(name)]
    }


def _tell_lost(errors: Mapping[str, float], emit: Emit) -> None:
    for name, error in errors.items():
        if error > LOST:
            emit(
                Note(
                    f"{name} lost {error:.0%} of its output: its weights may be too small for the dtype of the scales;"
                    " keep it in 16 bit with `--ignore`"
                )
            )


def _stages(block: Block, skeleton: Skeleton, emit: Emit) -> Callable[[str], None]:
    return lambda name: emit(Stage(block.index, len(skeleton.blocks), name))


def _no_linears(plan: Plan, skeleton: Skeleton) -> dict[str, str]:
    """Matrices that the headers look like linears and the model uses otherwise: {name: reason}."""
    linears = {block.tensors[f"{name}.weight"] for block in skeleton.blocks for name in block.linears()}
    return {
        name: "kept in 16 bit: the model does not use it as a plain linear"
        for name in plan.packed
        if f"{name}.weight" not in linears
    }


def _calibration_rows(recipe: Recipe, source: Checkpoint, record: RunRecord, emit: Emit) -> tuple[Tensor, ...]:
    tokenizer = load_tokenizer(source.path, trust_remote_code=recipe.trust_remote_code)
    corpus = load_corpus(recipe.calibration, split=recipe.calibration_split, column=recipe.calibration_column)
    rows = tokenize(corpus, tokenizer, samples=recipe.samples, seq_len=recipe.seq_len, seed=recipe.seed, emit=emit)
    record.calibration = rows.report
    packed = record.plan.packed
    widest, name = max(
        ((columns, name) for name, (_, columns) in record.plan.shapes.items() if name in packed), default=(0, "")
    )
    if (tokens := rows.report["tokens"]) < widest:
        emit(
            Note(
                f"{tokens:,} calibration tokens are fewer than the {widest:,} inputs of {name}: they will fit too well"
            )
        )
    return rows.rows


def _require_finite(source: Checkpoint) -> None:
    """Read every weight once before hours are spent on them; raises CheckpointError naming the first bad one."""
    for name, info in source.tensors.items():
        check_finite(name, source.read([name])[name], info.file)


def _open_artifacts(plan: Plan, output: OutputDirectory) -> list[Artifact]:
    """Open one artifact for each format."""
    folders, size = plan.recipe.folders(Path()), parse_size(plan.recipe.max_shard_size)
    return [
        Artifact(fmt, output.writer(plan.specs(fmt), size, folders[fmt.name]), plan.scale_dtype) for fmt in plan.formats
    ]


def _write_cache_scales(
    plan: Plan, block: Block, cache: CacheObserver, artifacts: Sequence[Artifact], record: RunRecord
) -> None:
    """Turn what a block's cache held into scales; raises CheckpointError where an attention was never seen."""
    scales = cache.scales([name for name, index in plan.attentions.items() if index == block.index])
    for artifact in artifacts:
        artifact.write_cache_scales(scales)
    record.add_cache(block.index, scales)


def _write_files(plan: Plan, skeleton: Skeleton, artifact: Artifact, record: RunRecord) -> None:
    """Everything beside the weights: config, sidecars, the recipe and the record."""
    fmt, writer, packed = artifact.format, artifact.writer, plan.packed
    schemes = {name: packed.get(name) for name in skeleton.linears()}
    quantization = fmt.config(schemes, fp8_cache=plan.recipe.kv_cache is not None)
    files = {"config.json": plan.source.config | {"quantization_config": quantization}, **fmt.files(quantization)}
    if record.cache:
        files |= sglang_files(str(plan.source.config.get("model_type", "")), record.cache_by_layer())
    copy_sidecars(plan.source.path, writer, skip=(RECIPE_FILE, RECORD_FILE, *files))
    for name, content in files.items():
        writer.add_file(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    writer.add_file(RECIPE_FILE, plan.recipe.to_yaml())
    record.finish(artifact)
    writer.add_file(RECORD_FILE, record.to_text(fmt.name))
