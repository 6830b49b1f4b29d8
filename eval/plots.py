"""Small SVG plots as text: intervals, grouped bars, rows of dots, a curve, a histogram, stacked bars.

Colours come from CSS variables of the page (--s0 .. --s5 for series), so one drawing serves light and dark.
Knows nothing of what is plotted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Interval = tuple[float, float | None, float | None]
"""Value, low, high; no whisker where low and high are None."""

SERIES = 6  # colours of the page
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 40


@dataclass(frozen=True)
class Scale:
    """Linear map of values low .. high to pixels start .. end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Box:
    """A drawing's size in pixels and the left edge of its plotting area."""

    width: int
    height: int
    left: int = LEFT

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def column(self, i: int, columns: int) -> float:
        """Middle of column i."""
        return round(self.left + (i + 0.5) * (self.right - self.left) / columns, 1)


SMALL, WIDE = Box(360, 270), Box(520, 300)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span low .. high, about `count` of them."""
    rough = max(high - low, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def intervals(
    series: Sequence[tuple[str, Sequence[Interval | None]]], labels: Sequence[str], *, x: str, y: str
) -> str:
    """Points with whiskers at each label, joined per series; None leaves a gap. The y axis runs from 0 to
    1."""
    box, ys = SMALL, ticks(0, 1)
    to_y = Scale(0, 1, box.bottom, TOP)
    parts = [_y_axis(box, ys, to_y, y), _columns(box, labels, x)]
    for s, (name, points) in enumerate(series):
        shift = (s - (len(series) - 1) / 2) * 7
        seen = [(i, box.column(i, len(labels)) + shift, p) for i, p in enumerate(points) if p is not None]
        path = " ".join(f"{px:.1f},{to_y(value)}" for _, px, (value, _, _) in seen)
        marks = [f'<polyline class="thin" points="{path}"/>']
        for i, px, point in seen:
            if point[1] is not None and point[2] is not None:
                marks.append(_line(px, px, to_y(point[1]), to_y(point[2])))
            marks.append(_dot(px, to_y(point[0]), f"{name}, {labels[i]}", point))
        parts.append(_group(s, marks))
    return _svg(box, parts)


def bars(series: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str], *, x: str, y: str) -> str:
    """Grouped bars, values in percent."""
    box = SMALL
    ys = ticks(0, max(1.0, *(value for _, values in series for value in values)))
    to_y = Scale(0, ys[-1], box.bottom, TOP)
    thick = min(30.0, (box.right - box.left) / len(labels) * 0.8 / len(series))
    parts = [_y_axis(box, ys, to_y, y, "%"), _columns(box, labels, x)]
    for s, (name, values) in enumerate(series):
        marks = []
        for i, value in enumerate(values):
            px = box.column(i, len(labels)) + (s - len(series) / 2) * thick
            tip = f"{name}, {labels[i]}: {value:.1f}%"
            marks.append(_bar(px + 0.5, to_y(value), thick - 1, box.bottom - to_y(value), tip))
        parts.append(_group(s, marks))
    return _svg(box, parts)


def dots(
    series: Sequence[tuple[str, Sequence[Interval | None]]], rows: Sequence[str], *, x: str, start: float
) -> str:
    """One row per label, in it a dot with its whisker per series; the x axis begins at or below `start`."""
    points = [point for _, found in series for point in found if point is not None]
    high = max(max(v for v in point if v is not None) for point in points)
    low = min(min(v for v in point if v is not None) for point in points)
    row = max(30, 10 * len(series) + 16)
    box = Box(SMALL.width, TOP + row * len(rows) + BOTTOM, left=96)
    xs = ticks(min(start, low), high)
    to_x = Scale(xs[0], xs[-1], box.left, box.right)
    parts = [_x_axis(box, xs, to_x, x), _row_names(box, rows, row)]
    for s, (name, found) in enumerate(series):
        marks = []
        for i, point in enumerate(found):
            if point is None:
                continue
            py = TOP + (i + 0.5) * row + (s - (len(series) - 1) / 2) * 10
            if point[1] is not None and point[2] is not None:
                marks.append(_line(to_x(point[1]), to_x(point[2]), py, py))
            marks.append(_dot(to_x(point[0]), py, f"{name}, {rows[i]}", point))
        parts.append(_group(s, marks))
    return _svg(box, parts)


def curve(points: Sequence[tuple[float, float]], *, x: str, y: str) -> str:
    """A line through (x, y) points, thin, and its running mean over a tenth of them, bold."""
    box, values = WIDE, [value for _, value in points]
    ys = ticks(min(values), max(values))
    last = points[-1][0]
    to_x, to_y = Scale(0, last, box.left, box.right), Scale(ys[0], ys[-1], box.bottom, TOP)
    span = max(1, len(points) // 20)
    windows = [values[max(0, i - span) : i + span + 1] for i in range(len(values))]
    parts = [_y_axis(box, ys, to_y, y), _x_axis(box, [v for v in ticks(0, last) if v <= last], to_x, x)]
    raw = " ".join(f"{to_x(px)},{to_y(value)}" for px, value in points)
    means = zip(points, windows, strict=True)
    mean = " ".join(f"{to_x(px)},{to_y(sum(window) / len(window))}" for (px, _), window in means)
    marks = [f'<polyline class="faint" points="{raw}"/>', f'<polyline class="bold" points="{mean}"/>']
    return _svg(box, [*parts, _group(0, marks)])


def histogram(counts: Sequence[int], *, x: str) -> str:
    """Counts of values in equal parts of 0 .. 1, and the height that uniform values would have."""
    box = Box(WIDE.width, 170)
    to_x, to_y = Scale(0, 1, box.left, box.right), Scale(0, max(*counts, 1) * 1.1, box.bottom, TOP)
    thick = (box.right - box.left) / len(counts)
    marks = [
        _bar(box.left + i * thick + 1, to_y(n), thick - 2, box.bottom - to_y(n), str(n))
        for i, n in enumerate(counts)
    ]
    even = to_y(sum(counts) / len(counts))
    dashed = f'<line class="even" x1="{box.left}" x2="{box.right}" y1="{even}" y2="{even}"/>'
    return _svg(box, [_x_axis(box, [0, 0.25, 0.5, 0.75, 1], to_x, x), _group(0, marks), dashed])


def stack(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, x: str) -> str:
    """One stacked bar per row: (label, [(part, length), ..]); equal parts share a colour."""
    row, names = 40, list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    box = Box(1060, TOP + row * len(rows) + BOTTOM, left=130)
    xs = ticks(0, max(sum(length for _, length in parts) for _, parts in rows), 8)
    to_x = Scale(0, xs[-1], box.left, box.right)
    drawn = [_x_axis(box, xs, to_x, x), _row_names(box, [label for label, _ in rows], row)]
    for i, (label, parts) in enumerate(rows):
        begin = 0.0
        for name, length in parts:
            wide = max(to_x(begin + length) - to_x(begin) - 1, 0.5)
            mark = _bar(
                to_x(begin) + 0.5, TOP + i * row + 7, wide, row - 14, f"{label}, {name}: {length:.3f}"
            )
            drawn.append(_group(names.index(name), [mark]))
            begin += length
    return _svg(box, drawn)


def legend(names: Sequence[str]) -> str:
    """Names beside the colours that the series of a plot have."""
    keys = (
        f'<span class="key"><i style="background:var(--s{i % SERIES})"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def _y_axis(box: Box, values: Sequence[float], to_y: Scale, name: str, unit: str = "") -> str:
    middle = (TOP + box.bottom) / 2
    turned = f'transform="translate(11 {middle}) rotate(-90)"'
    parts = [f'<text class="axis" text-anchor="middle" {turned}>{escape(name)}</text>']
    for value in values:
        parts.append(_grid(box.left, box.right, to_y(value), to_y(value)))
        parts.append(_text(box.left - 7, to_y(value) + 4, f"{value:g}{unit}", "end"))
    return "".join(parts)


def _x_axis(box: Box, values: Sequence[float], to_x: Scale, name: str) -> str:
    parts = [_axis_name(box, name)]
    for value in values:
        parts.append(_grid(to_x(value), to_x(value), TOP, box.bottom))
        parts.append(_text(to_x(value), box.bottom + 16, f"{value:g}", "middle"))
    return "".join(parts)


def _columns(box: Box, labels: Sequence[str], name: str) -> str:
    """Labels below the columns of a plot."""
    words = [
        _text(box.column(i, len(labels)), box.bottom + 16, label, "middle") for i, label in enumerate(labels)
    ]
    return "".join([*words, _axis_name(box, name)])


def _row_names(box: Box, labels: Sequence[str], row: float) -> str:
    return "".join(
        _text(box.left - 10, TOP + (i + 0.5) * row + 4, label, "end", "label")
        for i, label in enumerate(labels)
    )


def _axis_name(box: Box, name: str) -> str:
    return _text((box.left + box.right) / 2, box.height - 6, name, "middle", "axis")


def _grid(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float, name: str, point: Interval) -> str:
    value, low, high = point
    span = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(name)}: {value:.3f}{span}</title></circle>'
    )


def _bar(x: float, y: float, width: float, height: float, tip: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} rx="2"><title>{escape(tip)}</title></rect>'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _group(series: int, marks: Sequence[str]) -> str:
    return f'<g class="series" style="--c:var(--s{series % SERIES})">{"".join(marks)}</g>'


def _svg(box: Box, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {box.width} {box.height}" role="img">{"".join(parts)}</svg>'
