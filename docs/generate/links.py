"""Check the built site: python -m generate.links DIRECTORY.

Every link must lead to a page and an anchor that exist, and no page may load anything from another
host.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that a browser loads by itself, unlike links that a reader follows.
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
NOT_LOADED = {"canonical", "prev", "next", "alternate", "edit"}  # <link rel=...>


@dataclass
class Page(HTMLParser):
    """The links, the loaded files and the anchors of one page."""

    file: Path
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        for name in ("href", "src"):
            if name in values:
                loads = (tag, name) in LOADS and values.get("rel") not in NOT_LOADED
                (self.loads if loads else self.links).append(values[name])


def problems(site: Path) -> Iterator[str]:
    """Yield a sentence for each broken link and each load from another host."""
    pages = {file.resolve(): Page(file) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} holds no pages"
    for file, page in pages.items():
        for target in page.loads:
            if urlsplit(target).netloc:
                yield f"{page.file}: loads {target} from another host"
        if page.file.name == "404.html":  # served at any depth, so its links are not relative
            continue
        for target in (*page.links, *page.loads):
            problem = _problem(target, file, site.resolve(), pages)
            if problem:
                yield f"{page.file}: {target}: {problem}"


def _problem(target: str, file: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if path.is_dir():
        path /= "index.html"
    if not path.is_relative_to(site) or not path.exists():
        return "leads nowhere"
    if parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors:
        return "there is no such anchor"
    return None


def main() -> int:
    faults = list(problems(Path(sys.argv[1])))
    print("\n".join(faults) or "every link leads somewhere, nothing is loaded from elsewhere")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
