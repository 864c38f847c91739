"""Promise: the documentation's pages are up to date with the code, all in the site, and cite only
what exists."""

import ast
import importlib
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from generate.__main__ import pages as generated
from generate.__main__ import stale

from gpuscore.commands.cli import make_parser
from gpuscore.config import CONFIGS
from gpuscore.config.options import options
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import GpuscoreError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
# A file's path: at least one folder, and an extension that the repository uses.
PATH = re.compile(
    r"(?<![\w./{<~-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|toml|ya?ml|svg|txt|css|sh))(?![\w/])"
)
# Folders in which a cited path may begin, besides the folder of the citing file.
FOLDERS = ("", "gpuscore", "kernels/gpuscore_kernels", "docs", "docker", "tests")
STARTS = tuple(ROOT / folder for folder in FOLDERS)
# Paths that a command creates, or that are named because they must not exist.
ABSENT = ("site/", "scratch/", "secrets/", "kernels/__init__.py")
HISTORY = ("bench/LOG.md", "CHANGELOG.md")  # they say what was true on a day
SOURCES = ("gpuscore", "kernels", "tests", "bench", "docker", "examples", "docs/generate")


def files(folder: str, pattern: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob(pattern)) if ".venv" not in str(path)]


def pages() -> list[Path]:
    """Return all Markdown files of the repository that are not generated from code."""
    paths = [*ROOT.glob("*.md"), *files("docs", "*.md"), *files("docker", "*.md")]
    paths += [*files("kernels", "*.md"), *files("bench", "*.md"), *files("examples", "*.md")]
    return [path for path in paths if not path.is_relative_to(REFERENCE)]


def test_the_reference_is_what_the_code_says():
    """Ask what `make check` asks."""
    assert stale(REFERENCE, dict(generated())) == []


def text_of(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def test_the_reference_has_every_error_setting_and_route():
    errors = text_of("errors.md")
    for error in GpuscoreError.__subclasses__():
        assert f"| `{error.code}` | {error.status} | " in errors
    settings = text_of("settings.md")
    for option in options(*CONFIGS):
        assert f"`{option.flag}`<br>`{option.variable}`" in settings
    http = text_of("http.md")
    for path in DIALECT_OF:
        assert f"`POST {path}`" in http
    assert "`gpuscore_requests_total` | counter | `route`" in text_of("metrics.md")
    rerank, completions = (text_of(f"http/{n}.md") for n in ("v1-rerank", "v1-completions"))
    assert "| `truncated` | true or false | if true |" in rerank
    assert "| `document` | object or text, or null | if asked for |" in rerank
    assert "| `finish_reason` | text | always |" in completions
    commands = text_of("commands.md")
    for command in ("serve", "batch", "info", "parity compare"):
        assert f"\n## gpuscore {command}\n" in commands


def test_every_field_of_the_python_api_is_explained():
    """Fields without a docstring are left out of the pages."""
    text = text_of("scorer.md") + text_of("client.md")
    named = re.findall(r"^Class `([\w.]+)\.(\w+)`$", text, re.MULTILINE)
    assert len(named) > 10
    for module, name in named:
        kind = getattr(importlib.import_module(module), name)
        explained = re.findall(r"^    (\w+): \S", inspect.getdoc(kind) or "", re.MULTILINE)
        assert set(inspect.get_annotations(kind)) <= set(explained), name


def test_the_site_has_every_page():
    def named(entries):
        for entry in entries:
            if isinstance(entry, str):
                yield entry
            else:
                for inner in entry.values():
                    yield from named([inner] if isinstance(inner, str) else inner)

    nav = list(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = [page.relative_to(DOCS) for page in pages() if page.is_relative_to(DOCS)]
    made = [page.relative_to(DOCS) for page in REFERENCE.rglob("*.md")]
    assert sorted(nav) == sorted(str(page) for page in [*written, *made])


def test_links_between_pages_lead_somewhere():
    for page in [*pages(), *REFERENCE.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            place = page.parent / target
            assert place.exists(), (page, target)
            assert not page.is_relative_to(DOCS) or place.resolve().is_relative_to(DOCS), (
                f"{page}: {target} is no page of the site"
            )


def test_types_of_the_reference_are_explained_where_they_are_named():
    for page in REFERENCE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        headings = {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}
        named = set(re.findall(r"\[(\w+)\]\(#\w+\)", text))
        assert {name.lower() for name in named} <= headings, page


def cited(text: str) -> set[str]:
    return set(PATH.findall(re.sub(r"\w+://\S+", "", text)))


def missing(text: str, folder: Path) -> set[str]:
    """Return the paths that a text cites and that do not exist."""
    return {
        path
        for path in cited(text)
        if not path.startswith(ABSENT)
        and not any((start / path).exists() for start in (folder, folder.parent, *STARTS))
    }


def test_pages_cite_files_that_exist():
    wrong = {}
    for page in pages():
        if str(page.relative_to(ROOT)) not in HISTORY:
            text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))  # without links
            wrong[page] = missing(text, page.parent)
    assert not {page: cited for page, cited in wrong.items() if cited}


def test_docstrings_and_comments_cite_files_that_exist():
    wrong = {}
    for folder in SOURCES:
        for path in files(folder, "*.py"):
            source = path.read_text(encoding="utf-8")
            # Whole files first: to find the docstrings takes long, and few files lack anything.
            if missing(source, path.parent) and (absent := missing(said_in(source), path.parent)):
                wrong[str(path.relative_to(ROOT))] = absent
    assert not wrong


# Far faster than a tokenizer, and strings with such a mark are few.
COMMENT = re.compile(r"(?:^\s*|  )# .*$", re.MULTILINE)


def said_in(source: str) -> str:
    """Return a module's docstrings and comments."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    said = [ast.get_docstring(node) or "" for node in nodes]
    return "\n".join([*said, *COMMENT.findall(source)])


def test_make_targets_that_are_cited_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (page for page in pages() if str(page.relative_to(ROOT)) not in HISTORY):
        for target in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert target in targets, (page, target)


@pytest.mark.parametrize(
    ("page", "lines", "kilobytes"), [("README.md", 110, 8), ("ARCHITECTURE.md", 150, 12)]
)
def test_the_first_pages_stay_short(page, lines, kilobytes):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines
    assert len(text.encode()) <= kilobytes * 1024


def typed(page: Path) -> list[str]:
    """Return the lines that a page has a reader type, continued ones joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^( *)```sh\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [line.strip() for _, block in fenced for line in block.splitlines()]


# The first pages that a newcomer meets say themselves how to find the command.
FIRST = (ROOT / "README.md", DOCS / "install.md", *sorted((DOCS / "tasks").glob("*.md")))
ACTIVATE = ". .venv/bin/activate"
ON_THE_PATH = ("gpuscore ", "python ", "pip ", "PYTHONPATH=", "nohup gpuscore ")


def test_commands_are_written_one_way_that_works_in_a_fresh_clone():
    """`make` works without the environment; all else is on the path once it is active."""
    for page in pages():
        if page.is_relative_to(ROOT / "bench"):
            continue
        said = page.read_text(encoding="utf-8").replace(ACTIVATE, "")
        assert not re.search(r"\.venv/bin/\w", said), page
    for page in FIRST:
        lines = [line.partition("  #")[0].strip() for line in typed(page)]
        needing = [i for i, line in enumerate(lines) if line.startswith(ON_THE_PATH)]
        assert not needing or ACTIVATE in lines[: needing[0]], page
    for page in (ROOT / "README.md", DOCS / "how-to" / "troubleshoot.md"):
        assert f"`{ACTIVATE}`" in page.read_text(encoding="utf-8")


def test_commands_that_are_shown_can_be_parsed():
    shown = [line for page in pages() for line in typed(page) if line.startswith("gpuscore ")]
    rows = [row for page in pages() for row in page.read_text().splitlines() if row[:1] == "|"]
    cells = [cell for row in rows for cell in re.findall(r"\| `(gpuscore [a-z][^`.]+)` \|", row)]
    assert len(shown) > 30
    for line in {*shown, *cells}:
        words = shlex.split(re.split(r" (?:\||>|2>|&)", line, maxsplit=1)[0], comments=True)[1:]
        make_parser().parse_args(words)


def test_lines_that_install_name_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    install = (DOCS / "install.md").read_text(encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"pip install[^\n`]*'\.\[([\w,]+)\]'", text)
        assert {name for names in named for name in names.split(",")} <= {*extras}, page
        if page.is_relative_to(DOCS) and page.name != "install.md":
            assert "gpuscore[" not in text, page
    told = set(re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE))
    assert {*extras} - told == {"docs", "images"}
