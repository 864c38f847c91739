"""The reliability diagram as SVG: how often the most probable answer is right, by its probability.

A panel for each type of question has the bins before and after calibration. A bin on the diagonal
says what it means; the area of its circle is the number of its questions.
"""

from collections.abc import Mapping, Sequence
from html import escape

from gpuscore.measure.calibrate.metrics import Bin

SIDE, LEFT, TOP, GAP = 220, 48, 34, 40  # pixels of a panel's side, and around it
BELOW = 56
LARGEST = 11.0  # radius
BEFORE, AFTER, INK, FAINT = "#b0562b", "#1f6f8b", "#333", "#ccc"


def diagram(panels: Mapping[str, tuple[Sequence[Bin], Sequence[Bin]]], title: str) -> str:
    """Return the drawing; `panels` are the bins before and after, by type."""
    width = LEFT + len(panels) * (SIDE + GAP)
    height = TOP + SIDE + BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (name, (before, after)) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (SIDE + GAP), name, before, after)
    middle = TOP + SIDE / 2
    parts.append(
        f'<text transform="translate(14 {middle:g}) rotate(-90)" text-anchor="middle">'
        "share that is right</text>"
    )
    parts.append(_legend(LEFT, height - 14))
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, name: str, before: Sequence[Bin], after: Sequence[Bin]) -> list[str]:
    bottom, right = TOP + SIDE, left + SIDE
    parts = [
        f'<text x="{left + SIDE / 2:g}" y="{TOP - 12}" text-anchor="middle" font-size="13">'
        f"{escape(name)}</text>",
        f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="{FAINT}"/>',
        f'<path d="M{left} {bottom}L{right} {TOP}" stroke="{FAINT}" stroke-dasharray="4 3"/>',
    ]
    for tenth in (0, 5, 10):
        x, y = left + SIDE * tenth / 10, bottom - SIDE * tenth / 10
        parts.append(
            f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">{tenth / 10:g}</text>'
        )
        parts.append(f'<text x="{left - 5}" y="{y + 4:g}" text-anchor="end">{tenth / 10:g}</text>')
    most = max((one.count for one in (*before, *after)), default=1)
    for found, colour in ((before, BEFORE), (after, AFTER)):
        points = [
            (left + SIDE * one.probability, bottom - SIDE * one.accuracy, one) for one in found
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for x, y, one in points:
            radius = max(1.5, LARGEST * (one.count / most) ** 0.5)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" '
                f'fill-opacity="0.6"><title>{one.count} questions: {one.probability:.3f} said, '
                f"{one.accuracy:.3f} right</title></circle>"
            )
    parts.append(
        f'<text x="{left + SIDE / 2:g}" y="{bottom + 28}" text-anchor="middle">'
        "probability of the most probable answer</text>"
    )
    return parts


def _legend(left: int, y: int) -> str:
    return (
        f'<circle cx="{left + 6}" cy="{y - 4}" r="5" fill="{BEFORE}"/>'
        f'<text x="{left + 16}" y="{y}">before</text>'
        f'<circle cx="{left + 76}" cy="{y - 4}" r="5" fill="{AFTER}"/>'
        f'<text x="{left + 86}" y="{y}">after, on rows that it was not fitted on</text>'
    )
