"""A server, and pages of it in headless Chromium. Every test sees each request of its page, and
fails at one to another host, at a violation of its policy and at an exception of its scripts."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

GPUSCORE = os.environ.get("GPUSCORE", "gpuscore")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "chromium"
SCREENSHOTS = Path(os.environ.get("SCREENSHOTS", ".cache/web"))
KEY = "the key of the pages"
# No names are resolved, so that nothing but the server can be reached.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
]


@dataclass
class Server:
    url: str
    key: str = ""

    def link(self, path: str = "/", run: bool = True, **state: str) -> str:
        """Return the address of a page with a state in its fragment."""
        fragment = urlencode(state) + ("&run" if run else "")
        return f"{self.url}{path}#{fragment}"


@dataclass
class Seen:
    """Requests of a page, and complaints about it."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(f"{error}"))
        page.on("console", self._console)

    def _console(self, message: object) -> None:
        text = str(getattr(message, "text", ""))
        if "Content Security Policy" in text or "Content-Security-Policy" in text:
            self.complaints.append(text)

    def hosts(self) -> set[str]:
        parts = [urlsplit(url) for url in self.requests]
        return {part.netloc for part in parts if part.scheme not in ("data", "blob")}


@contextmanager
def serving(*flags: str, key: str = "", model: tuple[str, ...] = ("demo",)) -> Iterator[Server]:
    """Serve on a free port; with a key, requests need it."""
    command = [GPUSCORE, "serve", *model, "--port", "0", "--threads", "1", "--no-log-requests"]
    variables = {k: v for k, v in os.environ.items() if k != "GPUSCORE_API_KEY"}
    if key:
        variables["GPUSCORE_API_KEY"] = key
    process = subprocess.Popen(
        [*command, "--max-batch-tokens", "512", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
    )
    said = []
    try:
        for line in process.stdout or ():
            said.append(line)
            if "ready on" in line:
                yield Server(line.split("ready on ")[1].split(" ")[0], key)
                break
        else:
            raise RuntimeError("".join(said))
    finally:
        process.kill()
        process.communicate()  # closes its output, too


expect.set_options(timeout=30_000)  # the machine may be busy


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server without a key."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def guarded() -> Iterator[Server]:
    """A server with a key."""
    with serving(key=KEY) as running:
        yield running


@pytest.fixture(scope="session")
def two_models() -> Iterator[Server]:
    """A server of two models; requests choose one."""
    with serving(
        model=("--model", "one=demo", "--model", "two=demo", "--kv-cache-size", "32MiB")
    ) as running:
        yield running


@pytest.fixture(scope="session")
def without_family() -> Iterator[Server]:
    """A server whose model has no prompt family."""
    with serving("--family", "none") as running:
        yield running


@pytest.fixture(scope="session")
def gpuscore_python() -> Path:
    """The Python that has gpuscore and its client."""
    return Path(GPUSCORE).absolute().with_name("python")


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    yield opened
    opened.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Page]:
    """A page in a context of its own, without anything kept from other tests."""
    context = browser.new_context(
        viewport={"width": 1200, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(60_000)
    opened = context.new_page()
    seen.watch(opened)
    yield opened
    context.close()
    assert not seen.complaints
    assert len(seen.hosts()) <= 1, seen.hosts()


@pytest.fixture
def picture(page: Page, request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep a screenshot of the page as the test leaves it, for people to look at."""
    yield
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{request.node.name}.png", full_page=True)
