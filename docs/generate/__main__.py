"""Write the generated pages of the documentation: python -m generate DIRECTORY [--check].

With --check nothing is written, and pages that differ from what the code says are an error.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from generate import python, routes
from generate.commands import page_of_commands
from generate.errors import page_of_errors
from generate.families import page_of_families, page_of_other_flags
from generate.metrics import page_of_metrics
from generate.openapi import openapi
from generate.settings import page_of_settings


def pages() -> Iterator[tuple[str, str]]:
    """Yield the file name and text of every page of the reference."""
    yield from routes.pages(openapi())
    yield "errors.md", page_of_errors()
    yield "settings.md", page_of_settings()
    yield "metrics.md", page_of_metrics()
    yield "commands.md", page_of_commands()
    yield "families.md", page_of_families()
    yield "other-flags.md", page_of_other_flags()
    yield from python.pages()


def stale(directory: Path, made: Mapping[str, str]) -> list[str]:
    """Return the names of pages in a directory that are missing, changed or too many."""
    there = {
        str(file.relative_to(directory)): file.read_text(encoding="utf-8")
        for file in directory.rglob("*.md")
    }
    return sorted(name for name in {*there, *made} if there.get(name) != made.get(name))


def main() -> int:
    directory, *flags = sys.argv[1:]
    made = dict(pages())
    if flags == ["--check"]:
        names = stale(Path(directory), made)
        for name in names:
            print(f"{directory}/{name} is not what the code says; make format writes it")
        return bool(names)
    shutil.rmtree(directory, ignore_errors=True)
    for name, text in made.items():
        file = Path(directory, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
