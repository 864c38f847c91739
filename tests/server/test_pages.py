"""Promise: the pages for people come from the server alone, need no key, run no inline script, and
can be switched off. tests/browser/ opens them in a browser."""

import asyncio
import hashlib
import re
from html.parser import HTMLParser
from itertools import takewhile

import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.served import ServedModel
from gpuscore.server.api.app import create_app
from gpuscore.server.api.pages import DOCS, ROOT, UI
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.service import ScoringService
from support.connections import connected
from support.serving import SMALL, serving

PAGES = UI | DOCS
OWN = sorted(path for path in ROOT.rglob("*.*") if not path.name.startswith("swagger-ui"))
SPACES = {"http://www.w3.org/2000/svg"}  # a name, which nothing loads
ADDRESS = re.compile(r"""(?:https?:)?//[\w.-]+\.[a-z][^\s"'`)]*""")
LOADED = re.compile(r"""(?:from|import)\s+"(\./[^"]+)\"""")
MOST_LINES = 200


class Loads(HTMLParser):
    """The addresses that a page loads, and what its policy would forbid."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.forbidden: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "script" and not attributes.get("src"):
            self.forbidden.append("a script without an address")
        if tag == "style" or "style" in attributes:
            self.forbidden.append(f"a style in {tag}")
        self.forbidden += [name for name in attributes if name.startswith("on")]
        if tag in ("script", "img"):
            self.addresses += [attributes["src"]] if attributes.get("src") else []
        if tag == "link" and not attributes["href"].startswith("data:"):
            self.addresses.append(attributes["href"])


@pytest.mark.parametrize("path", PAGES)
def test_a_page_and_its_files_need_no_key(stranger, path):
    page = stranger.get(path)
    assert page.status_code == 200
    loads = Loads(page.text)
    assert loads.addresses
    assert not loads.forbidden
    for address in loads.addresses:
        assert not address.startswith("/")  # a proxy may put the server below a path
        file = stranger.get(f"/{address}")
        assert file.status_code == 200, address
        kind = file.headers["content-type"].split(";")[0]
        expected = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        assert kind == expected["." + address.rpartition(".")[2]]


@pytest.mark.parametrize("path", PAGES)
def test_the_policy_allows_only_files_of_this_server(stranger, path):
    policy = stranger.get(path).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert rules["frame-ancestors"] == "'none'"
    assert stranger.get(path).headers["x-content-type-options"] == "nosniff"


def test_what_is_seen_as_forbidden():
    text = '<script>1</script><p style="x" onclick="y"></p><style></style><img src="a">'
    loads = Loads(text)
    assert len(loads.forbidden) == 4
    assert loads.addresses == ["a"]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_our_files_name_no_other_host_and_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert set(ADDRESS.findall(text)) <= SPACES
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    for name in LOADED.findall(text):
        assert (path.parent / name).is_file(), name


def test_swagger_ui_is_unchanged():
    listed = (ROOT / "docs" / "swagger-ui.VERSION.txt").read_text(encoding="utf-8")
    sums = re.findall(r"^([0-9a-f]{64})  (\S+)$", listed, re.MULTILINE)
    others = {path.name for path in (ROOT / "docs").glob("swagger-ui*")}
    assert {name for _, name in sums} == others - {"swagger-ui.VERSION.txt"}
    for digest, name in sums:
        assert hashlib.sha256((ROOT / "docs" / name).read_bytes()).hexdigest() == digest


def paths_of(config):
    app = create_app(ScoringService([ServedModel("m")]), config, ApiKeys([]))
    return set(app.routes)


def test_no_ui():
    """Without the playground and the status page, the API's page is still there."""
    usual, without = paths_of(ServerConfig()), paths_of(ServerConfig(ui=False))
    assert {*UI, "/ui/playground.js"} <= usual
    assert not {path for path in without if path in UI or path.startswith("/ui/")}
    assert usual - without == {path for path in usual if path in UI or path.startswith("/ui/")}
    assert "/docs" in without


@pytest.mark.slow
def test_a_server_without_them():
    with serving("demo", *SMALL, "--no-ui") as server:
        with connected(server) as http:
            assert http.get("/").json()["error"]["code"] == "not_found"
            assert http.get("/docs").status_code == 200
        shown = list(takewhile(lambda line: "to stop" not in line, server.process.stdout))
        assert any("API docs" in line for line in shown)
        assert not any("to try" in line for line in shown)


def test_a_file_goes_out_as_its_client_takes_it():
    """Otherwise a client without a key that reads nothing would hold megabytes of the server."""
    app = create_app(ScoringService([ServedModel("m")]), ServerConfig(), ApiKeys([b"k"]))
    (path,) = ROOT.glob("docs/swagger-ui-bundle.js")
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    target = f"/docs/{path.name}"
    scope = {"type": "http", "method": "GET", "path": target, "raw_path": target.encode()}
    asyncio.run(app(scope | {"headers": [], "query_string": b"", "state": {}}, receive, send))
    bodies = [message["body"] for message in sent[1:]]
    assert b"".join(bodies) == path.read_bytes()
    assert max(map(len, bodies)) <= 2**16
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]
    assert (b"content-length", str(path.stat().st_size).encode()) in sent[0]["headers"]


def test_pages_are_in_no_openapi_document(client):
    assert not set(PAGES) & set(client.get("/openapi.json").json()["paths"])
