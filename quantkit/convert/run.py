"""Writing a conversion, one linear in memory at a time, and the account of it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.hub import resolve_model
from quantkit.checkpoint.outdir import require_writable_target
from quantkit.checkpoint.output import OutputDirectory
from quantkit.checkpoint.sidecars import copy_sidecars
from quantkit.checkpoint.writer import ArtifactWriter
from quantkit.convert.plan import RECORD_FILE, Conversion, plan_conversion
from quantkit.errors import UsageError
from quantkit.events import Emit, Stage, ignore
from quantkit.formats import FORMATS, Format
from quantkit.formats.kv_cache import sglang_files
from quantkit.formats.scales import cast_scale
from quantkit.patterns import closest
from quantkit.recipe import Recipe, parse_size
from quantkit.units import gigabytes
from quantkit.weights import CONFIG_FILES, CONFIG_KEYS, WeightSource

REPORT_FILES = ("report.json", "report.html", "README.md")  # of the old packing
FORMAT_VERSION = 1  # of quantkit.json
RECIPE_FILE = "quantkit-recipe.yaml"
_SHARD_SIZE = Recipe().max_shard_size
_PACKAGES = ("quantkit", "torch", "transformers", "safetensors")

Verify = Callable[[Path, Path], object]
"""Takes the folder that was written and the source's, and raises where something is wrong."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The account of a conversion.

    Attributes:
        nbytes: of all weight files.
        sha256: {weight file: digest}.
    """

    conversion: Conversion
    nbytes: int
    sha256: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """What is written as quantkit.json.

        `folds` and `origin` come from the source's own record, where it has one: how its codes were made stays true.
        """
        made = self.conversion
        source, record = made.source, made.record
        versions = {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}
        found: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "versions": versions,
            "source": {
                "name": made.name,
                "format": source.format.name if source.format else None,
                "digest": source.checkpoint.digest(),
                "bytes": source.checkpoint.nbytes,
            },
            "format": made.target.name,
            "linears": {name: {"scheme": str(scheme)} for name, scheme in made.schemes.items()},
            "scales": made.moved.to_json(),
            "kv_cache": {n: {"block": made.layers[n], "k": each.k, "v": each.v} for n, each in made.cache.items()},
            "output": {"bytes": self.nbytes, "sha256": self.sha256},
        }
        if record:
            found |= {"folds": record.get("folds", []), "origin": record.get("origin", record)}
        return found

    def summary(self) -> list[str]:
        """The conversion in a few lines."""
        made = self.conversion
        before = made.source.format.name if made.source.format else ""
        lines = [
            f"converted {len(made.schemes)} linears from {before} to {made.target.name},"
            f" {gigabytes(self.nbytes)}: codes and zero points are the same",
            made.moved.line(),
        ]
        if made.cache:
            where = (
                "" if any(map(made.target.cache_specs, made.cache)) else ", in `kv_cache_scales.tp*.json` for SGLang"
            )
            lines.append(f"FP8 KV cache: scales of {len(made.cache)} attention modules{where}")
        return lines


def convert(
    src: str | Path,
    out: str | Path,
    format: str,
    *,
    overwrite: bool = False,
    max_shard_size: str = _SHARD_SIZE,
    trust_remote_code: bool = False,
    verify: Verify | None = None,
    emit: Emit = ignore,
) -> Converted:
    """Write a quantized checkpoint in another format.

    Args:
        src: a packed checkpoint directory, or a name on the Hugging Face hub; in any format that is read here.
        out: the directory to write; it appears complete, or not at all.
        format: a name in `formats.FORMATS`.
        overwrite: replace a model that is in `out`.
        max_shard_size: limit for one weight file.
        verify: called on what was written before it appears in `out`.
        emit: told which tensor is written.

    Raises:
        UsageError: the source is not packed, or is in this format already; `out` may not be written.
        UnsupportedScheme: the format cannot hold what the source does; the message names the linear.
        CheckpointError: the source cannot be read, or contradicts itself.
    """
    size, target = parse_size(max_shard_size), _format(format)
    source = WeightSource.open(resolve_model(str(src), emit=emit))
    path = source.checkpoint.path
    require_writable_target(Path(out), overwrite=overwrite, source=path)
    name = Path(src).resolve().name if Path(src).exists() else str(src)
    conversion = plan_conversion(source, name, target, trust_remote_code=trust_remote_code, emit=emit)
    with OutputDirectory(Path(out), overwrite=overwrite, source=path) as output:
        output.clear()
        writer = output.writer(conversion.specs(), size)
        _write_weights(conversion, writer, emit)
        converted = Converted(conversion, writer.total_bytes, writer.digests())
        _write_files(converted, writer)
        sealed = writer.seal()
        if verify is not None:
            verify(sealed, path)
        output.commit()
    return converted


def _format(name: str) -> Format:
    if name not in FORMATS:
        near = closest(name, list(FORMATS))
        raise UsageError(
            f"unknown format `{name}`", f"did you mean `{near}`?" if near else f"choose one of {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def _write_weights(conversion: Conversion, writer: ArtifactWriter, emit: Emit) -> None:
    source, target, order = conversion.source, conversion.target, conversion.order
    for index, name in enumerate(order):
        emit(Stage(index, len(order), name))
        if source.tensors[name] is not None:
            writer.copy(source.checkpoint, [name])
            continue
        linear = name.removesuffix(".weight")
        q = replace(source.quantized(linear), scheme=conversion.schemes[linear])
        writer.write(target.pack(linear, cast_scale(linear, q, conversion.scale_dtype(linear))))
    for attention, each in conversion.cache.items():
        specs = target.cache_specs(attention)
        values = zip(specs.items(), (each.k, each.v), strict=bool(specs))
        writer.write({name: torch.full(shape, value) for (name, (_, shape)), value in values})


def _write_files(converted: Converted, writer: ArtifactWriter) -> None:
    """Everything beside the weights; files that describe the old packing, or its making, are left out."""
    made = converted.conversion
    config = {key: value for key, value in made.source.checkpoint.config.items() if key not in CONFIG_KEYS}
    files: dict[str, Any] = {
        "config.json": config | {CONFIG_KEYS[0]: made.quantization},
        **made.target.files(made.quantization),
    }
    if made.cache:
        files |= sglang_files(str(config.get("model_type", "")), made.cache_by_layer())
    old = made.source.checkpoint.path
    # the model card is one that a run wrote where its report is beside it
    reports = REPORT_FILES if (old / REPORT_FILES[0]).is_file() else ()
    copy_sidecars(old, writer, skip=(*CONFIG_FILES, RECIPE_FILE, RECORD_FILE, *reports, *files))
    for name, content in files.items():
        writer.add_file(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    writer.add_file(RECORD_FILE, json.dumps(converted.to_json(), indent=1, ensure_ascii=False) + "\n")
