"""Promise: the documentation's pages are up to date with the code, all in the site, and cite only
what exists."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from generate.links import problems
from generate.lists import problems as broken_lists

from gpuscore.config import CONFIGS
from gpuscore.config.options import options
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import GpuscoreError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = "reference"
# A file's path: at least one folder, and an extension that the repository uses.
PATH = re.compile(
    r"(?<![\w./{<~-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|toml|ya?ml|svg|txt|css|sh))(?![\w/])"
)
# Folders in which a cited path may begin, besides the folder of the citing file.
FOLDERS = ("", "gpuscore", "kernels/gpuscore_kernels", "docs", "docker", "tests")
STARTS = tuple(ROOT / folder for folder in FOLDERS)
# Paths that a command creates, or that are named because they must not exist.
ABSENT = ("site/", "docs/reference/", "scratch/", "secrets/", "kernels/__init__.py")
HISTORY = ("bench/LOG.md", "CHANGELOG.md")  # they say what was true on a day
SOURCES = ("gpuscore", "kernels", "tests", "bench", "docker", "examples", "docs/generate")


def files(folder: str, pattern: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob(pattern)) if ".venv" not in str(path)]


def pages() -> list[Path]:
    """Return all Markdown files of the repository that are not generated from code."""
    found = [*ROOT.glob("*.md"), *files("docs", "*.md"), *files("docker", "*.md")]
    found += [*files("kernels", "*.md"), *files("bench", "*.md"), *files("examples", "*.md")]
    return [path for path in found if REFERENCE not in path.relative_to(ROOT).parts]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The generated pages, made the way `make docs` makes them."""
    directory = tmp_path_factory.mktemp("docs") / REFERENCE
    environment = os.environ | {"PYTHONPATH": str(DOCS)}
    command = [sys.executable, "-P", "-m", "generate", str(directory)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    return directory


def text_of(reference: Path, name: str) -> str:
    return (reference / name).read_text(encoding="utf-8")


def test_the_reference_has_every_error_setting_and_route(reference):
    errors = text_of(reference, "errors.md")
    for error in GpuscoreError.__subclasses__():
        assert f"| `{error.code}` | {error.status} | " in errors
    settings = text_of(reference, "settings.md")
    for option in options(*CONFIGS):
        assert f"`{option.flag}`<br>`{option.variable}`" in settings
    http = text_of(reference, "http.md")
    for path in DIALECT_OF:
        assert f"`POST {path}`" in http
    assert "`gpuscore_requests_total` | counter | `route`" in text_of(reference, "metrics.md")
    rerank, completions = (text_of(reference, f"http/{n}.md") for n in ("rerank", "v1-completions"))
    assert "| `truncated` | true or false | if true |" in rerank
    assert "| `document` | object or text, or null | if asked for |" in rerank
    assert "| `finish_reason` | text | always |" in completions
    commands = text_of(reference, "commands.md")
    for command in ("serve", "score", "info", "parity compare"):
        assert f"\n## gpuscore {command}\n" in commands


def test_every_field_of_the_python_api_is_explained(reference):
    """Fields without a docstring are left out of the pages."""
    text = text_of(reference, "scorer.md") + text_of(reference, "client.md")
    named = re.findall(r"^::: ([\w.]+)\.(\w+)$", text, re.MULTILINE)
    assert len(named) > 10
    for module, name in named:
        kind = getattr(importlib.import_module(module), name)
        explained = re.findall(r"^    (\w+): \S", inspect.getdoc(kind) or "", re.MULTILINE)
        assert set(inspect.get_annotations(kind)) <= set(explained), name


def test_the_site_has_every_page(reference):
    def named(entries):
        for entry in entries:
            if isinstance(entry, str):
                yield entry
            else:
                for inner in entry.values():
                    yield from named([inner] if isinstance(inner, str) else inner)

    nav = list(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = [page.relative_to(DOCS) for page in pages() if page.is_relative_to(DOCS)]
    made = [REFERENCE / page.relative_to(reference) for page in reference.rglob("*.md")]
    assert sorted(nav) == sorted(str(page) for page in [*written, *made])


def test_links_between_pages_lead_somewhere(reference):
    for page in pages():
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            place = page.parent / target
            inside = os.path.relpath(place, DOCS / REFERENCE)
            made = not inside.startswith("..") and (reference / inside).exists()
            assert made or place.exists(), (page, target)
            assert not page.is_relative_to(DOCS) or place.resolve().is_relative_to(DOCS), (
                f"{page}: {target} is no page of the site"
            )


def test_types_of_the_reference_are_explained_where_they_are_named(reference):
    for page in reference.rglob("*.md"):
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
    assert not {page: found for page, found in wrong.items() if found}


def test_docstrings_and_comments_cite_files_that_exist():
    wrong = {}
    for folder in SOURCES:
        for path in files(folder, "*.py"):
            found = missing(said_in(path), path.parent)
            if found:
                wrong[str(path.relative_to(ROOT))] = found
    assert not wrong


# Far faster than a tokenizer, and strings with such a mark are few.
COMMENT = re.compile(r"(?:^\s*|  )# .*$", re.MULTILINE)


def said_in(path: Path) -> str:
    """Return a module's docstrings and comments."""
    source = path.read_text(encoding="utf-8")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    said = [ast.get_docstring(node) or "" for node in nodes]
    return "\n".join([*said, *COMMENT.findall(source)])


def test_make_targets_that_are_cited_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (page for page in pages() if str(page.relative_to(ROOT)) not in HISTORY):
        for target in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert target in targets, (page, target)


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">1</a><a href="#here">2</a><a href="c.html">3</a>'
        '<a href="b.html#gone">4</a><a href="../x.html">5</a><a href="https://example.org">6</a>'
    )
    (tmp_path / "b.html").write_text(
        '<p id="there"><script src="https://example.org/a.js"></script><img src="no.svg">'
    )
    found = [line.removeprefix(str(tmp_path.resolve())) for line in problems(tmp_path.resolve())]
    assert found == [
        "/a.html: c.html: leads nowhere",
        "/a.html: b.html#gone: there is no such anchor",
        "/a.html: ../x.html: leads nowhere",
        "/b.html: loads https://example.org/a.js from another host",
        "/b.html: no.svg: leads nowhere",
    ]


def test_the_check_of_lists_finds_broken_ones(tmp_path):
    docs, site = tmp_path / "docs", tmp_path / "site"
    docs.mkdir()
    site.mkdir()
    (docs / "right.md").write_text("1. one\n2. two\n    - inner\n\n```\n- code\n```\n")
    (site / "right.html").write_text(
        "<nav><li></nav><article><ol><li>one<li>two<ul><li>inner</ul></ol></article>"
    )
    (docs / "wrong.md").write_text(
        "1. one\n\n    More of it.\n2. two\n\nThe default is\n16. More.\n"
    )
    (site / "wrong.html").write_text(
        "<article><ol><li>one<p>More of it. 2. two</ol>The default is 16. More.</article>"
    )
    assert list(broken_lists(docs, site)) == [
        f"{docs / 'wrong.md'}: a list begins with 16",
        f"{docs / 'wrong.md'}: 3 list items in the text, 1 in the site",
    ]


@pytest.mark.parametrize(
    ("page", "lines", "kilobytes"), [("README.md", 120, 8), ("ARCHITECTURE.md", 150, 12)]
)
def test_the_first_pages_stay_short(page, lines, kilobytes):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines
    assert len(text.encode()) <= kilobytes * 1024


def test_the_glossary_has_at_most_25_words():
    text = (DOCS / "explanation" / "glossary.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| ", text, re.MULTILINE)) - 2 <= 25
