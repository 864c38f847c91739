"""Promise: the documentation's requests get the answers it shows, the tests it names exist, and the
prompts it shows are in use."""

import json
import re

import pytest

from gpuscore.dialects.table import DIALECT_OF
from gpuscore.prompts.registry import FAMILIES
from support.connections import VOLATILE, same_answer
from support.pages import ROOT, ROUTE, compare_numbers, other_routes, shown_requests

PAGES = sorted((ROOT / "docs" / "dialects").glob("*.md"))
REQUEST = re.compile(
    r"```http\n(GET|POST) (\S+)\n(?:\n(\{.*?))?```\n+(?:[^`]*?)```json\n(.*?)```", re.DOTALL
)
REMOVED = re.compile(r"^### Removed$.*?(?=^##|\Z)", re.DOTALL | re.MULTILINE)  # of the changelog
# Fields that differ between answers, machines or states of the prefix cache.
OF_THE_MACHINE = {*("model_dtype", "max_batch_tokens", "version", "machine", "versions", "commit")}
OF_THE_MACHINE |= {"settings"}  # of the server that the test starts


def examples():
    for page in PAGES:
        requests = REQUEST.findall(page.read_text(encoding="utf-8"))
        assert requests, page
        for number, (method, path, body, answer) in enumerate(requests):
            yield pytest.param(method, path, body, answer, id=f"{page.stem}-{number}")


@pytest.mark.parametrize(("method", "path", "body", "answer"), list(examples()))
def test_requests_are_answered_as_shown(demo, method, path, body, answer):
    got = demo.request(method, path, json=json.loads(body) if body else None)
    assert got.status_code == 200, got.text
    same_answer(got.json(), json.loads(answer), 5e-4, VOLATILE | OF_THE_MACHINE)


def test_every_dialect_has_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in DIALECT_OF:
        assert f"`{path}`" in text or f"POST {path}\n" in text, path


def test_routes_that_are_cited_exist(demo):
    known = {"/docs", "/status", "/openapi.json", *demo.get("/openapi.json").json()["paths"]}
    known |= {"/ping", "/invocations"}  # shown as further paths of our routes
    folders = {"/cache", "/tmp", "/models"}
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = REMOVED.sub("", page.read_text(encoding="utf-8"))
        cited = set(ROUTE.findall(text)) - other_routes(text)
        assert cited - folders <= known, page


DEMO = shown_requests(real=False)
NAMES = [f"{shown.page}-{number}" for number, shown in enumerate(DEMO)]


@pytest.mark.parametrize("shown", DEMO, ids=NAMES)
def test_requests_of_the_tasks_are_answered_as_shown(demo, shown):
    """The demo model answers these; `real_model/test_pages.py` sends the rest to SmolLM2."""
    of_a_guard = shown.path == "/v1/classify" and "labels" not in shown.body  # demo is no guard
    got = demo.post(shown.path, json=shown.body)
    assert got.status_code == (400 if of_a_guard else 200), got.text
    if shown.answer is not None:
        compare_numbers(got.text, shown.answer)


def test_the_shown_answers_are_found():
    assert any(shown.answer for shown in DEMO)
    assert sum(shown.answer is not None for shown in shown_requests(real=True)) >= 4


def test_promises_name_tests_that_exist():
    index = (ROOT / "docs" / "explanation" / "promises.md").read_text(encoding="utf-8")
    cited = re.findall(r"`(tests/\S*?)(?:::(\w+))?`", index)
    assert len(cited) > 100
    for file, name in cited:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, (file, name)


def test_every_test_file_says_what_it_promises():
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert path.read_text(encoding="utf-8").startswith('"""Promise'), path


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_row_and_its_prompt(name):
    docs = ROOT / "docs"
    assert f"| [{name}](reference/families.md#{name}) |" in (docs / "families.md").read_text()
    _, *sections = re.split(r"^## ", (docs / "reference/families.md").read_text(), flags=re.M)
    (section,) = [section for section in sections if section.startswith(f"{name}\n")]
    family = FAMILIES[name]
    for text in (*family.parts, *(text for _, text in family.messages), family.instruction):
        assert text in section
