"""What the user asked for, and its YAML form. Knows no model; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from quantkit.errors import UsageError
from quantkit.patterns import closest
from quantkit.scheme import Override, Scheme, parse_override

METHOD_NAMES = ("rtn", "gptq", "awq", "awq+gptq", "none")
FORMAT_NAMES = ("compressed-tensors", "gptq", "awq", "modelopt")
KV_CACHES = ("fp8",)
TARGETS = ("vllm", "sglang", "tgi", "tensorrt-llm", "transformers")
INDIVISIBLE = ("fail", "smaller-group", "keep")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,2})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One quantization run, as asked. Field names are the command line's, with `_` for `-`.

    Attributes:
        method: one of METHOD_NAMES; `none` leaves every weight as it is.
        bits: width of a code, 4 or 8.
        group_size: input features that share a scale; -1 means one scale per output channel.
        symmetric: fixed zero point in the middle of the range.
        refine: rounds of refinement after the method; None leaves it to the method.
        samples: calibration sequences.
        seq_len: tokens per calibration sequence.
        seed: of every random choice.
        calibration: `builtin`, a local file or a dataset's hub name.
        calibration_split: split of a hub dataset.
        calibration_column: column that holds the text.
        ignore: patterns of linears to keep in 16 bit, besides `lm_head`.
        override: `'PATTERN: bits=8,group_size=32'`; later ones win.
        indivisible: what to do with a linear that the group size does not divide, one of INDIVISIBLE.
        format: one or more of FORMAT_NAMES; each makes an artifact of the same codes.
        kv_cache: one of KV_CACHES, whose scales are calibrated, or None.
        target: the engine, one of TARGETS, whose rules the plan must satisfy, or None.
        tp: tensor-parallel ranks of the target.
        device: auto, cpu, cuda or cuda:N.
        dtype: of forward passes, one of DTYPES.
        max_shard_size: of a written file, such as 500MB, 4GB or 1.5GiB.
        strict: a fallback makes the exit code 1.
        trust_remote_code: run modelling code that comes with the checkpoint.
    """

    method: str = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    refine: int | None = None
    samples: int = 128
    seq_len: int = 2048
    seed: int = 0
    calibration: str = "builtin"
    calibration_split: str | None = None
    calibration_column: str | None = None
    ignore: tuple[str, ...] = ()
    override: tuple[str, ...] = ()
    indivisible: str = "fail"
    format: tuple[str, ...] = ("compressed-tensors",)
    kv_cache: str | None = None
    target: str | None = None
    tp: int = 1
    device: str = "auto"
    dtype: str = "auto"
    max_shard_size: str = "4GB"
    strict: bool = False
    trust_remote_code: bool = False

    @property
    def scheme(self) -> Scheme:
        """The scheme of a linear that no override names.

        Raises:
            UnsupportedScheme: bits or group size are out of range.
        """
        return Scheme(self.bits, self.group_size, self.symmetric)

    @property
    def overrides(self) -> tuple[Override, ...]:
        """The overrides, read.

        Raises:
            UsageError: one cannot be read.
        """
        return tuple(parse_override(text) for text in self.override)

    def folders(self, out: Path) -> dict[str, Path]:
        """{format: where its artifact goes}: `out` itself, or a folder in it where there are several."""
        return {name: out if len(self.format) == 1 else out / name for name in self.format}

    @classmethod
    def from_yaml(cls, path: Path | str) -> Self:
        """Read a recipe file; fields it leaves out have their defaults.

        Raises:
            UsageError: no such file, not YAML, an unknown or repeated key, a value of another type.
        """
        given = _read_yaml(Path(path))
        _check_keys(given, f"recipe `{path}`")
        return cls(**{name: _checked(name, value, f"recipe `{path}`: ") for name, value in given.items()})

    def to_yaml(self) -> str:
        """Write every field, in the order of declaration."""
        import yaml

        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)

    def merged(self, **given: Any) -> Self:
        """Replace the fields that are given; None means not given.

        Raises:
            UsageError: an unknown field, or a value of another type.
        """
        _check_keys(given, "recipe")
        return replace(self, **{name: _checked(name, value) for name, value in given.items() if value is not None})

    def validate(self) -> Self:
        """Return this recipe when every field is in range; one text where several may stand is a tuple of one then.

        Raises:
            UsageError: a field is not; the message names it and its value.
            UnsupportedScheme: bits or group size are out of range.
        """
        checked = self.merged(**{field.name: getattr(self, field.name) for field in fields(self)})
        checked._require_range()
        checked._require_effect()
        return checked

    def _require_range(self) -> None:
        for name, options in _CHOICES.items():
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if each is not None:
                    check_choice(name, each, options)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{_option(name)} is {value}, and must be at least {least}")
        check_device(self.device)
        if not self.calibration.strip():
            raise UsageError("`--calibration` is empty", "name a file, a dataset, or `builtin`")
        # reading these is checking them
        _ = parse_size(self.max_shard_size), self.scheme, self.overrides

    def _require_effect(self) -> None:
        """Refuse options that would change nothing beside the others."""
        if not self.format or len(set(self.format)) < len(self.format):
            named = ", ".join(self.format) or "nothing"
            raise UsageError(f"`--format` names {named}", "name each format once, and at least one")
        if self.tp > 1 and self.target is None:
            raise UsageError("`--tp` says how an engine splits the model, and no engine is named", "add `--target`")
        if self.method != "none":
            return
        if self.kv_cache is None:
            raise UsageError("`--method none` leaves nothing to do", "add `--kv-cache fp8`, or choose a method")
        default = type(self)()
        if idle := [name for name in _ROUNDING if getattr(self, name) != getattr(default, name)]:
            raise UsageError(f"{_option(idle[0])} says how weights are rounded, and `--method none` rounds none")


_CHOICES = {
    "method": METHOD_NAMES,
    "format": FORMAT_NAMES,
    "kv_cache": KV_CACHES,
    "target": TARGETS,
    "indivisible": INDIVISIBLE,
    "dtype": DTYPES,
}
_LEAST = {"samples": 1, "seq_len": 2, "seed": 0, "refine": 0, "tp": 1}
_ROUNDING = ("bits", "group_size", "symmetric", "refine", "ignore", "override", "indivisible")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Read `500MB`, `4GB`, `1.5GiB` or a plain number as bytes.

    Raises:
        UsageError: it is no size, or less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    size = 0
    if found:
        number, unit, binary = found[1], (found[2] or "").lower(), found[3]
        size = int(float(number) * (1024 if binary else 1000) ** _UNITS[unit])
    if size < 1:
        raise UsageError(f"`{text}` is no size", "write it as 500MB, 4GB or 1.5GiB")
    return size


def check_device(text: str) -> None:
    """Accept auto, cpu, cuda and cuda:N; whether the device exists is for the run to find out.

    Raises:
        UsageError: it is another text.
    """
    if not _DEVICE.fullmatch(text):
        raise UsageError(f"`--device {text}` is no device", "use auto, cpu, cuda or cuda:N")


def check_choice(name: str, value: str, options: Collection[str]) -> None:
    """Accept one of the options of a field.

    Raises:
        UsageError: it is none of them; the hint has the closest.
    """
    if value in options:
        return
    near = closest(value, options)
    listed = ", ".join(options)
    hint = f"did you mean `{near}`? The choices are {listed}" if near else f"choose one of {listed}"
    raise UsageError(f"{_option(name)} is `{value}`, which is not known", hint)


def _option(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _check_keys(given: Mapping[str, object], where: str) -> None:
    known = [field.name for field in fields(Recipe)]
    for key in given:
        if key not in known:
            near = closest(str(key).replace("-", "_"), known)
            hint = f"did you mean `{near}`?" if near else f"the keys are {', '.join(known)}"
            raise UsageError(f"{where} has an unknown key `{key}`", hint)


_KINDS: dict[str, tuple[type, str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "bool": (bool, "true or false"),
}


def _checked(name: str, value: object, where: str = "") -> Any:
    """Return the value when it has the field's type; a list of texts, or one text, becomes a tuple."""
    declared = {field.name: str(field.type) for field in fields(Recipe)}[name]
    if declared == "tuple[str, ...]":
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UsageError(f"{where}`{name}` is {value!r}, and must be a list of texts")
    if value is None and declared.endswith("| None"):
        return None
    kind, words = _KINDS[declared.removesuffix(" | None")]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{where}`{name}` is {value!r}, and must be {words}")
    return value


def _read_yaml(path: Path) -> dict[str, object]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        given = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"recipe `{path}` cannot be read: {reason}") from None
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"recipe `{path}`{line}: {getattr(problem, 'problem', None) or 'not YAML'}") from None
    except (ValueError, RecursionError) as problem:  # `!!int x`, a date that is none, brackets without end
        raise UsageError(f"recipe `{path}` cannot be read: {problem}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UsageError(f"recipe `{path}` holds no `key: value` lines")
    seen: set[str] = set()
    assert isinstance(node, yaml.MappingNode)
    for key, _ in node.value:
        if key.value in seen:
            raise UsageError(f"recipe `{path}`, line {key.start_mark.line + 1}: `{key.value}` is given twice")
        seen.add(key.value)
    return given
