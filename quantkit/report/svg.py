"""The pictures of a report, as SVG text: each answers one question, carries its labels, and needs no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 16, 34
SMALLEST = 1e-9  # below this a divergence is drawn as this


def tail(percents: Sequence[float], model: Sequence[float], floor: Sequence[float] | None, floor_name: str) -> str:
    """KL of the tokens beyond each percentile on a log scale, and the noise floor below it.

    Args:
        percents: ascending; drawn at equal distances, so that the last thousandth has room.
        model: nats, one for each.
        floor: nats, one for each, or None.
    """
    lines = [model] + ([floor] if floor else [])
    logs = [math.log10(max(value, SMALLEST)) for line in lines for value in line]
    low, high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(percents) - 1)

    def y(value: float) -> float:
        return _y((math.log10(max(value, SMALLEST)) - low) / (high - low))

    parts = []
    every = max(1, (high - low + 4) // 5)
    for power in range(low, high + 1, every):
        parts.append(_grid(_y((power - low) / (high - low)), f"1e{power}" if abs(power) > 2 else f"{10.0**power:g}"))
    for k, percent in enumerate(percents):
        anchor = "end" if k == len(percents) - 1 else "middle"
        parts.append(
            _text(LEFT + k * step + (RIGHT if anchor == "end" else 0), HEIGHT - 18, f"{percent:g}%", "m", anchor)
        )
    parts.append(_text(LEFT, HEIGHT - 4, "of tokens are closer than this, nats", "m"))
    for style, name, line in zip(("a", "c"), ("quantized", floor_name), lines, strict=False):
        places = " ".join(f"{LEFT + k * step:.1f},{y(value):.1f}" for k, value in enumerate(line))
        parts.append(f'<polyline class="l{style}" points="{places}"/>')
        parts.append(_text(LEFT + 4, min(map(y, line[:3])) - 7, name, f"t{style}"))
    told = f"99.9% of tokens: {model[-1]:.2g} nats" + (f"; noise floor {floor[-1]:.2g}" if floor else "")
    return _svg("KL divergence by percentile", told, parts)


def blocks(errors: Sequence[tuple[int, float, float, str]]) -> str:
    """Output error per block: a bar for the mean of its linears, a dot for the largest."""
    top = _nice(max(largest for _, _, largest, _ in errors))
    step = (WIDTH - LEFT - RIGHT) / len(errors)
    parts = [_grid(_y(share), f"{share * top:.2g}") for share in (0, 0.5, 1)]
    every = max(1, -(-len(errors) // 8))
    for k, (block, mean, largest, _) in enumerate(errors):
        x, base = LEFT + k * step, _y(0)
        parts.append(_bar(x + step * 0.15, _y(mean / top), step * 0.7, base - _y(mean / top), "fa"))
        parts.append(f'<circle class="fb" cx="{x + step / 2:.1f}" cy="{_y(largest / top):.1f}" r="2.2"/>')
        if k % every == 0:
            parts.append(_text(x + step / 2, HEIGHT - 18, str(block), "m", "middle"))
    parts.append(_text(LEFT, HEIGHT - 4, "block; bar: mean of its linears, dot: the worst of them", "m"))
    _, _, largest, name = max(errors, key=lambda each: each[2])
    return _svg("Relative output error per block", f"worst: {name}, {largest:.2%}", parts)


def confidence(bins: Sequence[tuple[float, float, float, float]]) -> str:
    """Mean KL by how sure the reference is.

    Args:
        bins: (low, high, share of tokens, mean KL in nats).
    """
    top = _nice(max(mean for *_, mean in bins))
    step = (WIDTH - LEFT - RIGHT) / len(bins)
    parts = [_grid(_y(share), f"{share * top:.2g}") for share in (0, 0.5, 1)]
    parts += [_text(2, HEIGHT - 18, "sure", "m"), _text(2, HEIGHT - 4, "tokens", "m")]
    for k, (low, high, share, mean) in enumerate(bins):
        x, y = LEFT + k * step, _y(mean / top)
        parts.append(_bar(x + step * 0.15, y, step * 0.7, _y(0) - y, "fa"))
        parts.append(_text(x + step / 2, y - 4, f"{mean:.2g}", "ta", "middle"))
        parts.append(_text(x + step / 2, HEIGHT - 18, f"{low * 100:.0f}-{high * 100:.0f}%", "m", "middle"))
        parts.append(_text(x + step / 2, HEIGHT - 4, f"{share:.0%}", "m", "middle"))
    told = ", ".join(f"{low:.0%} to {high:.0%}: {mean:.2g}" for low, high, _, mean in bins)
    return _svg("Mean KL by the reference's confidence", told, parts)


def sizes(rows: Sequence[tuple[str, int, bool]]) -> str:
    """Bytes as bars.

    Args:
        rows: (what, bytes, whether it is the model before).
    """
    most = max(size for _, size, _ in rows)
    step = (HEIGHT - TOP - 6) / len(rows)
    room = WIDTH - 96 - 76
    parts = []
    for k, (name, size, before) in enumerate(rows):
        y = TOP + k * step
        parts.append(_text(90, y + step * 0.55, name, "m", "end"))
        parts.append(_bar(96, y + step * 0.15, max(1.0, room * size / most), step * 0.6, "fc" if before else "fa"))
        parts.append(_text(102 + room * size / most, y + step * 0.55, megabytes(size), "ti"))
    told = ", ".join(f"{name} {megabytes(size)}" for name, size, _ in rows)
    return _svg("Bytes on disk", told, parts)


def megabytes(size: float) -> str:
    """Bytes in the unit in which a reader compares them."""
    return (
        f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"
    )


def _y(share: float) -> float:
    """Height of a share of the axis."""
    return TOP + (1 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)


def _nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten at or above a value."""
    if not 0 < value < math.inf:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 5) if step * power >= value), 10 * power)


def _grid(y: float, label: str) -> str:
    line = f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 5, y + 3.5, label, "m", "end")


def _bar(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0.5):.1f}"/>'


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, told: str, parts: Sequence[str]) -> str:
    described = f"<title>{escape(title)}</title><desc>{escape(told)}</desc>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{described}{"".join(parts)}</svg>'
