"""Promise: the status page shows what /metrics counts, and asks for nothing else."""

import json
import re
import urllib.request

from playwright.sync_api import expect


def score(server, items=20):
    body = {
        "items": [f"item {i}" for i in range(items)],
        "query": "q " * 60,
        "label_token_ids": [1],
    }
    request = urllib.request.Request(
        server.url + "/v1/score", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()


def card(page, name):
    return page.locator(".card", has=page.get_by_role("heading", name=name, exact=True))


def test_what_the_server_does(page, server, seen, picture):
    page.goto(f"{server.url}/status")
    expect(card(page, "Ready").locator(".value")).to_have_text("yes")
    expect(card(page, "Ready")).to_contain_text("1 of 1 replicas")
    expect(card(page, "Requests waiting").locator(".value")).to_have_text("0")
    row = page.locator("#replicas tbody tr")
    expect(row).to_contain_text("demo 0")
    page.locator("#period").select_option("1")
    score(server)
    expect(row).to_contain_text("of 512 tokens")  # a batch's fill
    expect(page.locator("#requests")).to_contain_text("/v1/score")
    assert {url.rpartition("/")[2].split("?")[0] for url in seen.requests} <= {
        *("status", "page.css", "status.js", "dom.js", "metrics.js", "server.js", "icon.svg"),
        *("metrics", "models", "info"),
    }


def test_speed_and_cache_of_the_time_between_two_looks(page, server):
    page.goto(f"{server.url}/status")
    expect(card(page, "Ready").locator(".value")).to_have_text("yes")
    value = card(page, "Tokens computed per second").locator(".value")
    for _ in range(60):  # a look sees what came since the last one
        score(server)
        page.wait_for_timeout(200)
        if re.match(r"[1-9]", value.inner_text()):
            break
    else:
        raise AssertionError("no speed was shown")
    expect(card(page, "Prompt tokens not computed").locator(".value")).to_have_text(
        re.compile(r"^[1-9].* %$")
    )


def test_keys(page, guarded):
    page.goto(f"{guarded.url}/status")
    expect(page.locator("#server")).to_contain_text("API key is required")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(guarded.key)
    page.keyboard.press("Enter")
    expect(card(page, "Ready").locator(".value")).to_have_text("yes")


def test_replicas_and_models(page, two_models, picture):
    page.goto(f"{two_models.url}/status")
    expect(page.locator("#replicas tbody tr")).to_have_count(2)
    expect(page.locator("#replicas")).to_contain_text("two 0")
