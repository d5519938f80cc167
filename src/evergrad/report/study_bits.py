"""The picture of a number's bits: sign, exponent and mantissa from left to right, and what a flip of each one does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evergrad.dtypes import DType, Layout
from evergrad.report.blocks import Block, Figure
from evergrad.report.markup import literal
from evergrad.report.palette import PALETTE
from evergrad.report.study_data import StudyData
from evergrad.report.study_rates import groups_of
from evergrad.study.columns import PUBLISHED
from evergrad.study.plan import CellPlan
from evergrad.study.rendering import Quantity

_MOST = 6
_BITS = re.compile(r"\bbits=(\d+(?:-\d+)?|sign|exponent-msb|exponent|mantissa)(?:,|$)")


def bit_blocks(data: StudyData, measure: str) -> list[Block]:
    """A figure for each place on the other axes, of a study whose faults are of one bit or a few, by their position."""
    results = data.results
    plans = {id(cell): tally.plan for cell, tally in data.cells()}
    header, entry = PUBLISHED[measure]
    blocks: list[Block] = []
    groups = groups_of(results, ("fault",))
    for name, cells in groups[:_MOST]:
        layout = _layout(plans[id(cells[0])])
        if layout is None:
            continue
        found = [
            (span, quantity, cell.known)
            for cell in cells
            if (span := bits_of(plans[id(cell)].fault, layout)) is not None
            and (quantity := entry(cell, results)) is not None
        ]
        if len({span for span, _, _ in found}) > 1:
            caption = (
                f"**{header}** by the bit that flips{f', {literal(name)}' if name else ''}; bit 0 is the sign. "
                f"Bars are intervals of {100 * results.confidence:g} %; a position without a mark was not tried."
            )
            traces = _traces(found, layout, header)
            blocks.append(Figure(f"{results.study} bits {name}".strip(), traces, _frame(layout, header), caption, 400))
    return blocks


def bits_of(fault: str, layout: Layout) -> tuple[int, int] | None:
    """The first and the last bit that a fault may flip, from the sign on; None if it may be any, or it flips none.

    >>> [bits_of(f"bitflip:bits={bits}", DType("float32").layout) for bits in ("sign", "exponent", "9-12")]
    [(0, 0), (1, 8), (9, 12)]
    """
    if not fault.startswith("bitflip") or (told := _BITS.search(fault)) is None:
        return None
    exponent = layout.exponent_bits
    named = {
        "sign": (0, 0),
        "exponent-msb": (1, 1),
        "exponent": (1, exponent),
        "mantissa": (exponent + 1, exponent + layout.mantissa_bits),
    }
    if told[1] in named:
        return named[told[1]]
    first, _, last = told[1].partition("-")
    span = int(first), int(last or first)
    return span if span[0] <= span[1] <= exponent + layout.mantissa_bits else None


def _layout(cell: CellPlan) -> Layout | None:
    """Of the numbers that are hit; None if a program of the user's own holds them."""
    dtype = DType.named(getattr(cell.training, "precision", ""))
    return dtype.layout if dtype is not None and dtype.layout.exponent_bits else None


def _traces(
    found: Sequence[tuple[tuple[int, int], Quantity, int]], layout: Layout, header: str
) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for field in ("sign", "exponent", "mantissa"):
        mine = [one for one in found if _field(one[0][0], layout) == field]
        traces.append(
            {
                "type": "bar", "name": field, "marker": {"color": PALETTE[field]},
                "x": [(first + last) / 2 for (first, last), _, _ in mine],
                "width": [last - first + 0.8 for (first, last), _, _ in mine],
                "y": [quantity.value for _, quantity, _ in mine],
                "error_y": {
                    "type": "data", "symmetric": False, "thickness": 1.4, "width": 4, "color": PALETTE["muted"],
                    "array": [(one.high if one.high is not None else one.value) - one.value for _, one, _ in mine],
                    "arrayminus": [one.value - (one.low if one.low is not None else one.value) for _, one, _ in mine],
                },
                "text": [
                    f"{_position(span)} ({field})<br>{header}: {one}<br>{known:,} trainings"
                    for span, one, known in mine
                ],
                "textposition": "none", "hovertemplate": "%{text}<extra></extra>", "showlegend": True,
            }
        )  # fmt: skip
    # A dot on the line where a rate is nought, which as a bar would look like one that was not tried.
    zero = [span for span, quantity, _ in found if quantity.value == 0]
    traces.append(
        {
            "type": "scatter", "mode": "markers", "showlegend": False, "hoverinfo": "skip",
            "x": [(first + last) / 2 for first, last in zero], "y": [0] * len(zero),
            "marker": {"size": 7, "color": [PALETTE[_field(first, layout)] for first, _ in zero]},
        }
    )  # fmt: skip
    return traces


def _frame(layout: Layout, header: str) -> dict[str, Any]:
    """The axes, and below them the strip of fields."""
    exponent, whole = layout.exponent_bits, 1 + layout.exponent_bits + layout.mantissa_bits
    fields = (("sign", 0, 0), ("exponent", 1, exponent), ("mantissa", exponent + 1, whole - 1))
    shapes = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": first - 0.5, "x1": last + 0.5, "y0": -0.06, "y1": -0.01,
            "fillcolor": PALETTE[name], "line": {"width": 0}, "layer": "above",
        }
        for name, first, last in fields
    ]  # fmt: skip
    shown = [0, 1, *range(4, whole, 4)] if whole <= 32 else [0, 1, *range(8, whole, 8)]
    return {
        "barmode": "overlay",
        "shapes": shapes,
        "margin": {"b": 70},
        "xaxis": {
            "title": {"text": f"bit, of {whole}: 1 sign, {exponent} exponent, {layout.mantissa_bits} mantissa"},
            "range": [-0.7, whole - 0.3],
            "tickvals": shown,
            "ticks": "outside",
            "ticklen": 20,
            "tickcolor": "rgba(0,0,0,0)",
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"title": {"text": header}, "range": [0, 104] if "%" in header else None},
    }


def _field(bit: int, layout: Layout) -> str:
    return "sign" if bit == 0 else "exponent" if bit <= layout.exponent_bits else "mantissa"


def _position(span: tuple[int, int]) -> str:
    first, last = span
    return f"bit {first}" if first == last else f"bits {first} to {last}"
