"""Draw query, items and mask: python -m generate.picture writes docs/assets/mask.svg."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CELL, LEFT, TOP = 20, 96, 64
WIDTH, RIGHT = 640, 22
FILE = Path(__file__).parents[1] / "assets" / "mask.svg"
# The card has a background of its own, so that it is legible on any page.
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #57606a; }
  .cell { stroke: #d0d7de; fill: #f6f8fa; }
  .query { fill: #0969da; } .own { fill: #bc4c00; } .shared { fill: #54aeff; }
  .line { stroke: #57606a; fill: none; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d; }
    text { fill: #e6edf3; }
    .small { fill: #9198a1; }
    .cell { stroke: #30363d; fill: #161b22; }
    .query { fill: #388bfd; } .own { fill: #f0883e; } .shared { fill: #1f4f8f; }
    .line { stroke: #9198a1; }
  }
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous run of tokens: the query, or an item."""

    name: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def segments(query: int, items: Sequence[int]) -> list[Segment]:
    found = [Segment("query", 0, query)]
    for number, length in enumerate(items, start=1):
        found.append(Segment(f"item {number}", found[-1].end, length))
    return found


def kind(row: int, column: int, parts: Sequence[Segment]) -> str:
    """Return the kind of token that a row sees in a column, or "" if it does not see it.

    This is the mask rule for one request without KV pages.
    """
    query = parts[0]
    own = next(part for part in parts if part.start <= row < part.end)
    if own.start <= column <= row:
        return "query" if own is query else "own"
    return "shared" if own is not query and column < query.end else ""


def picture(query: int = 7, items: Sequence[int] = (3, 3, 4)) -> str:
    parts = segments(query, items)
    total = parts[-1].end
    height = TOP + total * CELL + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'width="{WIDTH}" height="{height}" aria-labelledby="title">',
            '<title id="title">One query, three items: every item sees the query and itself, '
            "and never another item</title>",
            f"<style>{STYLE}</style>",
            '<rect class="card" x="0.5" y="0.5" rx="8" '
            f'width="{WIDTH - 1}" height="{height - 1}"/>',
            *_grid(total, parts),
            *_names(parts),
            *_results(parts),
            f'<text class="small" x="{LEFT}" y="{height - 16}">'
            "A row is a token; its coloured cells are the tokens that it sees.</text>",
            "</svg>",
            "",
        ]
    )


def _grid(total: int, parts: Sequence[Segment]) -> Iterator[str]:
    for row in range(total):
        for column in range(total):
            x, y = LEFT + column * CELL, TOP + row * CELL
            look = f"cell {kind(row, column, parts)}".strip()
            yield f'<rect class="{look}" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'


def _names(parts: Sequence[Segment]) -> Iterator[str]:
    for part in parts:
        middle = (part.start + part.length / 2) * CELL
        first, last = part.start * CELL + 3, part.end * CELL - 3
        yield f'<text x="{LEFT + middle:g}" y="{TOP - 20}" text-anchor="middle">{part.name}</text>'
        yield f'<path class="line" d="M{LEFT + first} {TOP - 6}v-6H{LEFT + last}v6"/>'
        yield f'<text x="{LEFT - 18}" y="{TOP + middle + 4:g}" text-anchor="end">{part.name}</text>'
        yield f'<path class="line" d="M{LEFT - 6} {TOP + first}h-6V{TOP + last}h6"/>'


def _results(parts: Sequence[Segment]) -> Iterator[str]:
    x = LEFT + parts[-1].end * CELL
    query = parts[0]
    y = TOP + query.length * CELL / 2
    yield f'<text class="small" x="{x + 14}" y="{y - 4:g}">computed once,</text>'
    yield f'<text class="small" x="{x + 14}" y="{y + 12:g}">cached for later requests</text>'
    for part in parts[1:]:
        y = TOP + (part.end - 0.5) * CELL
        yield f'<path class="line" d="M{x + 4} {y:g}h16m-5 -4l5 4l-5 4"/>'
        yield f'<text x="{x + RIGHT + 4}" y="{y + 4:g}">p(yes), p(no) of {part.name}</text>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
