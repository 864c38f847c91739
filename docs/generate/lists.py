"""Check that every list of the documentation is a list in the built site: python -m generate.lists
DOCS SITE.

A wrapped line that begins with a number becomes a list item, and an item that follows an indented
paragraph without an empty line becomes a part of that paragraph. Neither is an error of Markdown.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^( *)(?:[-*]|(\d+)\.) ", re.MULTILINE)
ARTICLE = re.compile(r"<article.*?</article>", re.DOTALL)


def problems(docs: Path, site: Path) -> Iterator[str]:
    """Yield a sentence for each page whose lists differ from its text's."""
    for page in sorted(docs.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        marks = MARK.findall(FENCE.sub("", text))
        for number in _out_of_order(marks):
            yield f"{page}: a list begins with {number}"
        shown = _items(_built(page.relative_to(docs), site))
        if shown != len(marks):
            yield f"{page}: {len(marks)} list items in the text, {shown} in the site"


def _out_of_order(marks: list[tuple[str, str]]) -> Iterator[int]:
    last: dict[str, int] = {}
    for indent, digits in marks:
        if digits and int(digits) not in (1, last.get(indent, 0) + 1):
            yield int(digits)
        last[indent] = int(digits or 0)


def _built(page: Path, site: Path) -> str:
    name = "index" if page.stem == "README" else page.stem
    return (site / page.parent / f"{name}.html").read_text(encoding="utf-8")


def _items(html: str) -> int:
    return sum(article.count("<li") for article in ARTICLE.findall(html))


def main() -> int:
    faults = list(problems(Path(sys.argv[1]), Path(sys.argv[2])))
    print("\n".join(faults) or "every list is a list")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
