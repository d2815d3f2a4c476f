"""The figures as a picture: bus bandwidth over size, one line per operation, and the map of pairs. SVG, pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dtctl.bench.figures import format_message_size

COLOURS = ("#2f6fde", "#d1495b", "#2a9d8f", "#e9a23b", "#7b5ea7", "#5b8c5a", "#8d6e63", "#37474f", "#c2185b")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 640, 360, 64, 40, 48, 150
CELL = 44


def render_bench_svg(figures: Mapping[str, Any]) -> str:
    """Return an SVG of what `dtctl bench --json` prints."""
    rows: Sequence[Mapping[str, Any]] = figures["results"]
    pairs: Mapping[str, Any] = figures.get("pairs") or {}
    count = len(pairs["gb_s"]) if pairs else 0
    side = (count + 1) * CELL + 60 if count else 0
    height = max(HEIGHT, side)
    width = WIDTH + LEGEND + side
    title = f"{figures['backend']}, {figures['world_size']} workers"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15">bus bandwidth, {escape(title)}</text>',
        *_render_bandwidth_lines(rows),
        *(_render_pair_map(pairs, WIDTH + LEGEND) if count else ()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _render_bandwidth_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [row for row in rows if row["busbw_gb_s"] > 0]
    if not rows:
        return []
    x_low, x_high = _compute_log_range([row["size"] for row in rows])
    y_low, y_high = _compute_log_range([row["busbw_gb_s"] for row in rows])
    right, base = WIDTH - 10, HEIGHT - BOTTOM

    def at(size: float, rate: float) -> tuple[float, float]:
        x = LEFT + (right - LEFT) * (math.log10(size) - x_low) / (x_high - x_low)
        y = base - (base - TOP) * (math.log10(rate) - y_low) / (y_high - y_low)
        return round(x, 1), round(y, 1)

    parts = [f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="#9aa3af"/>']
    for power in range(math.ceil(y_low), math.floor(y_high) + 1):
        _, y = at(rows[0]["size"], 10**power)
        parts.append(f'<path d="M{LEFT} {y}H{right}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    for size in sorted({row["size"] for row in rows if _is_round(row["size"])}):
        x, _ = at(size, rows[0]["busbw_gb_s"])
        parts.append(
            f'<text x="{x}" y="{base + 18}" text-anchor="middle" font-size="10">{format_message_size(size)}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}">GB/s</text>')
    for index, op in enumerate(dict.fromkeys(row["op"] for row in rows)):
        colour = COLOURS[index % len(COLOURS)]
        points = [at(row["size"], row["busbw_gb_s"]) for row in rows if row["op"] == op]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{WIDTH + 8}" y="{TOP + 12 + 18 * index}" fill="{colour}">{escape(op)}</text>')
    return parts


def _compute_log_range(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(numbers)), math.log10(max(numbers))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _is_round(size: int) -> bool:
    return size & (size - 1) == 0


def _render_pair_map(pairs: Mapping[str, Any], indent: int) -> list[str]:
    table: Sequence[Sequence[float | None]] = pairs["gb_s"]
    top = max((rate for row in table for rate in row if rate is not None), default=1.0) or 1.0
    parts = [
        f'<text x="{indent}" y="22" font-size="15">GB/s from (row) to, {format_message_size(pairs["size"])}</text>'
    ]
    for index in range(len(table)):
        parts.append(f'<text x="{indent + (index + 1.4) * CELL}" y="{TOP + 12}" text-anchor="middle">{index}</text>')
        parts.append(f'<text x="{indent + 16}" y="{TOP + (index + 1.1) * CELL}" text-anchor="middle">{index}</text>')
    for i, row in enumerate(table):
        for j, rate in enumerate(row):
            if rate is None:
                continue
            x, y, shade = indent + (j + 0.9) * CELL, TOP + (i + 0.6) * CELL, rate / top
            colour = f"rgb({int(209 - 162 * shade)},{int(73 + 120 * shade)},{int(91 + 50 * shade)})"
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{colour}"/>')
            parts.append(
                f'<text x="{x + CELL / 2}" y="{y + CELL / 2 + 4}" text-anchor="middle" fill="#fff" font-size="11">'
                f"{rate:.2g}</text>"
            )
    return parts
