"""Results to one self-contained page: no network, no script, every text escaped. A pure function."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from quantkit.report import svg
from quantkit.report.results import Result, verdict
from quantkit.report.style import STYLE

# the browser itself refuses to fetch or run anything
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_NONE = "\N{EN DASH}"


def render(results: Sequence[Result]) -> str:
    """Write the page of one or several artifacts.

    Args:
        results: at least one; several get a table that compares them first.
    """
    single = len(results) == 1
    title = f"{results[0].name}, quantized" if single else f"{len(results)} quantized models"
    body = [f"<h1>{escape(title)}</h1>"]
    if not single:
        body.append(_comparison(results))
    for result in results:
        body += ([] if single else [f"<h2>{escape(result.name)}</h2>"]) + _section(result)
    values = [result.to_json() for result in results]
    text = json.dumps(values[0] if single else values, indent=1, ensure_ascii=False)
    body.append(f'<details><summary>All of it as JSON</summary><pre id="report">{escape(text)}</pre></details>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(result: Result) -> list[str]:
    style = "" if not result.judged else " missed" if result.failed else " met"
    parts = [f'<p class="verdict{style}">{escape(verdict(result))}</p>']
    parts += [f'<p class="note">{escape(note)}</p>' for note in result.notes]
    if result.measured:
        parts.append(_figures(result.measured, result.sizes))
    parts.append(f'<div class="pictures">{"".join(_pictures(result))}</div>')
    parts.append(_provenance(result))
    return parts


def _comparison(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        measured, (_, size) = result.measured, result.sizes
        kl = measured.get("kl")
        rows.append(
            [
                result.name,
                svg.megabytes(size),
                _number(measured.get("perplexity"), ".3f"),
                _change(measured),
                _with_error(kl["mean"], kl["stderr"], ".3g") if kl else _NONE,
                _number(kl["percentiles"].get("99.9"), ".3g") if kl else _NONE,
                _number(kl["top1"], ".2%") if kl else _NONE,
            ]
        )
    return _table(["", "size", "perplexity", "change", "KL, nats", "99.9% KL", "same token"], rows)


def _figures(measured: Mapping[str, Any], sizes: tuple[int, int]) -> str:
    """The table: each metric of the reference and of the model, and how sure the difference is."""
    kl, floor = measured["kl"], measured.get("noise_floor")
    before, after = sizes
    difference = _with_error(measured["difference"], measured["difference_stderr"], "+.4f")
    rows = [
        [
            "loss, nats per token",
            _number(measured["nll_reference"], ".4f"),
            _number(measured["nll"], ".4f"),
            difference,
        ],
        [
            "perplexity",
            _number(measured["perplexity_reference"], ".3f"),
            _number(measured["perplexity"], ".3f"),
            _change(measured),
        ],
        ["KL, nats per token", _floor(floor, "mean"), _with_error(kl["mean"], kl["stderr"], ".3g"), ""],
        ["KL, median", _floor(floor, "median"), _number(kl["median"], ".3g"), ""],
        *(
            [f"KL, {percent}%", _floor(floor, "percentiles", percent), _number(kl["percentiles"][percent], ".3g"), ""]
            for percent in ("90", "99", "99.9")
        ),
        ["KL, maximum", _floor(floor, "maximum"), _number(kl["maximum"], ".3g"), ""],
        [
            "same most likely token",
            _number(floor["top1"], ".2%") if floor else _NONE,
            _with_error(kl["top1"], kl["top1_stderr"], ".2%"),
            "",
        ],
        ["size", svg.megabytes(before), svg.megabytes(after), f"{before / after:.2f}x smaller" if after else ""],
    ]
    said = (
        f"{measured['tokens']:,} tokens of {measured['data']} in {measured['windows']} windows of"
        f" {measured['window']}, in {measured['dtype']}. ± is one standard error, windows being the units."
    )
    if floor:
        said += (
            f" Of the reference, KL and agreement are the noise floor: {floor['dtype']} against"
            f" {measured['dtype']}, over {floor['tokens']:,} tokens."
        )
    return _table(["", "reference", "quantized", "change"], rows) + f'<p class="note">{escape(said)}</p>'


def _pictures(result: Result) -> Iterable[str]:
    measured = result.measured
    if measured:
        kl, floor = measured["kl"], measured.get("noise_floor")
        percents = [float(percent) for percent in kl["percentiles"]]
        model = list(kl["percentiles"].values())
        noise = list(floor["percentiles"].values()) if floor else None
        name = f"{floor['dtype']} noise" if floor else ""
        caption = f"One token in a thousand is further away than {model[-1]:.2g} nats"
        caption += f"; 16-bit arithmetic alone moves it by {noise[-1]:.2g}." if noise else "."
        yield _figure("How bad is the tail?", svg.tail(percents, model, noise, name), caption)
    if blocks := result.blocks():
        _, _, error, worst = max(blocks, key=lambda each: each[2])
        caption = f"The worst linear is {worst}: it loses {error:.2%} of its output over the calibration tokens."
        yield _figure("Where does it come from?", svg.blocks(blocks), caption)
    if measured and (bins := measured["by_confidence"]):
        total = sum(each["tokens"] for each in bins)
        rows = [(each["low"], each["high"], each["tokens"] / total, each["mean"]) for each in bins]
        sure = bins[-1]
        caption = (
            f"Where the reference is {sure['low']:.0%} sure or more, KL is {sure['mean']:.2g} nats and the most likely"
            f" token stays the same {sure['top1']:.1%} of the time."
        )
        yield _figure("Does it matter?", svg.confidence(rows), caption)
    before, after = result.sizes
    if before and after:
        kinds = [(kind, size, False) for kind, size in result.bytes_by_kind.items() if size]
        kinds = [("kept as it was" if kind == "other" else kind, size, last) for kind, size, last in kinds]
        rows_ = [("before", before, True), ("after", after, False), *kinds]
        caption = f"{before / after:.2f} times smaller; what no linear packs stays in its own dtype."
        yield _figure("What did it buy?", svg.sizes(rows_), caption)


def _provenance(result: Result) -> str:
    record, measured = result.record, result.measured
    recipe, source = record.get("recipe", {}), record.get("source", {})
    calibration, tensors = record.get("calibration", {}), record.get("tensors", {})
    fallbacks = record.get("fallbacks", [])
    shown = "; ".join(f"{each['name']}: {each['reason']}" for each in fallbacks[:20])
    more = f"; and {len(fallbacks) - 20} more" if len(fallbacks) > 20 else ""
    rows = {
        "source": f"{source.get('name', '')} (sha256 {source.get('digest', 'unknown')})",
        "recipe": ", ".join(f"{key}={_plain(value)}" for key, value in recipe.items() if value not in (None, [], "")),
        "format": record.get("format", ""),
        "calibration": f"{calibration.get('rows_used', 0):,} rows, {calibration.get('tokens', 0):,} tokens of"
        f" {calibration.get('source', '')} (sha256 {calibration.get('tokens_digest', 'unknown')})",
        "evaluation": f"{measured['data']} (sha256 {measured['digest']})" if measured else "none",
        "tensors": ", ".join(f"{kind} {count}" for kind, count in tensors.items()),
        "fallbacks": f"{len(fallbacks)}: {shown}{more}" if fallbacks else "none",
        "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        "run": f"{record.get('seconds', 0):,.0f} s on {record.get('device', '')} in {record.get('dtype', '')},"
        f" peak memory {svg.megabytes(record.get('peak_rss', 0))}",
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows.items())
    return f"<h2>Provenance</h2><dl>{items}</dl>"


def _figure(question: str, picture: str, caption: str) -> str:
    return f"<figure><b>{escape(question)}</b>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{first}</tr>{body}</table></div>'


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _with_error(value: float, error: float | None, form: str) -> str:
    said = format(value, form)
    return said if error is None else f"{said} ± {format(error, form.lstrip('+') if 'g' not in form else '.2g')}"


def _change(measured: Mapping[str, Any]) -> str:
    ratio, error = measured.get("perplexity_ratio"), measured.get("difference_stderr")
    if ratio is None:
        return _NONE
    return f"{ratio - 1:+.2%}" + ("" if error is None else f" ± {ratio * error:.2%}")


def _floor(floor: Mapping[str, Any] | None, *keys: str) -> str:
    value: Any = floor
    for key in keys:
        value = value and value.get(key)
    return _number(value, ".2g")


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
