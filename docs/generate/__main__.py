"""Write the generated pages of the documentation: python -m generate DIRECTORY."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from generate import python, routes
from generate.commands import page_of_commands
from generate.errors import page_of_errors
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
    yield from python.pages()


def main() -> None:
    directory = Path(sys.argv[1])
    shutil.rmtree(directory, ignore_errors=True)
    for name, text in pages():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
