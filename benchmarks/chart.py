"""Grouped bars as SVG text: a panel for each group of bars, one scale per panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#8aa0b8", "#5b7796", "#2f4f73", "#f0b27a", "#d35400", "#c0392b", "#7f8c8d", "#27ae60")
_BAR, _GAP, _LEFT, _TOP, _HEIGHT, _BELOW = 26, 34, 20, 30, 170, 30


@dataclass(frozen=True)
class Panel:
    """Groups of bars side by side."""

    title: str
    groups: tuple[str, ...]
    """Below the bars."""
    values: tuple[tuple[float | None, ...], ...]
    """Of each group, one of each series; None leaves a gap."""


def draw(panels: Sequence[Panel], series: Sequence[str], unit: str) -> str:
    """An SVG document; every bar carries its number. Groups have scales of their own, for a rate of 8 streams dwarfs one."""
    group_width = _BAR * len(series) + _GAP
    width = 2 * _LEFT + max(len(p.groups) for p in panels) * group_width
    legend_rows = -(-len(series) // 2)
    panel_height = _TOP + _HEIGHT + _BELOW
    height = 16 + 20 * legend_rows + panel_height * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, name in enumerate(series):
        x, y = _LEFT + (index % 2) * (width // 2), 14 + 20 * (index // 2)
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(x + 18, y + 10, name))
    for row, panel in enumerate(panels):
        top = 16 + 20 * legend_rows + row * panel_height
        parts.append(_text(_LEFT, top + 18, f"{panel.title} ({unit})", weight="bold"))
        floor = top + _TOP + _HEIGHT
        for group, (label, values) in enumerate(zip(panel.groups, panel.values, strict=True)):
            left = _LEFT + group * group_width
            parts += _bars(left, floor, values)
            parts.append(_text(left + _BAR * len(series) / 2, floor + 18, label, anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def _bars(left: float, floor: float, values: Sequence[float | None]) -> list[str]:
    most = max((v for v in values if v is not None), default=0.0) or 1.0
    parts = [
        f'<line x1="{left}" y1="{floor}" x2="{left + _BAR * len(values)}" y2="{floor}" stroke="#bbbbbb"/>'
    ]
    for index, value in enumerate(values):
        if value is None:
            continue
        high = (_HEIGHT - 24) * value / most
        x, y = left + index * _BAR, floor - high
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<rect x="{x + 1}" y="{y:.1f}" width="{_BAR - 2}" height="{high:.1f}" fill="{colour}"/>'
        )
        shown = f"{value:.0f}" if value >= 20 else f"{value:.1f}"
        parts.append(_text(x + _BAR / 2, y - 4, shown, anchor="middle", size=10))
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}" fill="#222222">{escape(text)}</text>'
    )
