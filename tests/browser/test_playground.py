"""Promise: the playground shows the server's own numbers, keeps its state in the address, and works
without a mouse, behind a key and on a phone."""

import json
import re
import urllib.error
import urllib.request

import pytest
from playwright.sync_api import expect

from asked import BEST, ITEMS, QUERY, RERANK, STATE, done, post, rows
from conftest import Server
from prefix_proxy import below_a_path


def test_an_address_fills_and_runs_a_request(page, server, picture):
    page.goto(server.link(**STATE))
    done(page)
    assert page.locator("textarea[name=query]").first.input_value() == QUERY
    shown = rows(page)
    body = {"query": QUERY, "items": ITEMS, "labels": ["yes", "no"]}
    plain = post(server, "/v1/score", {**body, "return_label_mass": True})
    soft = post(server, "/v1/score", {**body, "apply_softmax": True})
    order = sorted(range(3), key=lambda i: -soft["scores"][i][0])
    assert [row[1] for row in shown] == [ITEMS[i] for i in order]
    for row, i in zip(shown, order, strict=True):
        expected = [*soft["scores"][i], *plain["scores"][i], plain["label_mass"][i]]
        assert [float(cell) for cell in row[2:]] == pytest.approx(expected, abs=6e-5)
    head = page.locator("#results thead th").all_inner_texts()
    assert head == ["Rank", "Item", "yes", "no", "P(yes)", "P(no)", "Label mass"]
    expect(page.locator("#results .bar").last).to_be_visible()
    assert re.search(r"53 prompt tokens, \d+ of them cached", page.locator(".summary").inner_text())


def test_labels_of_several_tokens_divided_by_lines(page, server):
    """With line feeds, spaces and commas belong to the labels."""
    labels = ["yes, it is", " no"]
    page.goto(server.link(query=QUERY, items=BEST, labels="\n".join(labels)))
    done(page)
    ((_, _, *cells),) = rows(page)
    body = {"query": QUERY, "items": [BEST], "labels": labels, "apply_softmax": True}
    (expected,) = post(server, "/v1/score", body)["scores"]
    assert [float(cell) for cell in cells[:2]] == pytest.approx(expected, abs=6e-5)


def test_without_labels_the_family_ranks(page, server, seen):
    page.goto(server.link(**RERANK))
    done(page)
    shown = rows(page)
    body = {"query": RERANK["query"], "documents": ITEMS}
    expected = post(server, "/v1/rerank", body | {"return_label_mass": True})["results"]
    assert [row[1] for row in shown] == [ITEMS[result["index"]] for result in expected]
    masses = [float(row[3]) for row in shown]
    assert masses == pytest.approx([result["label_mass"] for result in expected], abs=6e-5)
    got = [float(row[2]) for row in shown]
    assert got == pytest.approx([result["relevance_score"] for result in expected], abs=6e-5)
    assert f"{server.url}/v1/rerank" in seen.requests


def test_two_requests_beside_each_other(page, server, picture):
    page.goto(server.link(**RERANK, **{"b.query": "a red lamp"}))
    done(page)
    a, b = (page.locator("#results .run").nth(i) for i in (0, 1))
    expect(a.locator("td.item").first).to_have_text(BEST)
    expect(b.locator("td.item").first).to_have_text(ITEMS[0])
    both = rows(page, "#results .both")
    assert [row[3] for row in both][0] == BEST
    first = both[0]
    assert float(first[6]) == pytest.approx(float(first[5]) - float(first[4]), abs=2e-4)


def test_tokens_on_hover_and_their_tree(page, server, picture):
    page.goto(server.link(**STATE))
    done(page)
    page.locator("#results .tree summary").click()
    tree = page.locator("#results .tree")
    expect(tree).to_contain_text("3 prompts have 53 tokens")
    expect(tree).to_contain_text("The server counted as many.")
    cell = page.locator("#results td.item").first
    cell.hover()
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    shown = tip.inner_text().replace("·", " ").replace("↵", "\n").replace("\u200b", "")
    assert shown.replace("\n", "") == (QUERY + BEST).replace("\n", "")
    body = {"prompt": QUERY + BEST}
    ids = post(server, "/tokenize", body)["tokens"]
    titles = [token.get_attribute("title") for token in tip.locator(".token").all()]
    assert titles == [f"id {token_id}" for token_id in ids]
    assert tip.locator(".token.all").count() > 5
    assert tip.locator(".token.own").count() > 1
    cell.focus()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_errors_are_shown_as_the_server_says_them(page, server, picture):
    page.goto(server.link(items="a", task="classify"))
    alert = page.locator("#results [role=alert]")
    expect(alert).to_contain_text("missing_labels")
    request = urllib.request.Request(
        server.url + "/v1/classify",
        json.dumps({"input": ["a"]}).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    message = json.load(refused.value)["error"]["message"]
    expect(alert.locator(".message")).to_have_text(message)
    expect(alert).to_contain_text("status 400")


def test_one_bad_item_does_not_hide_the_others(page, server):
    long = "word " * 5000
    page.goto(server.link(query=RERANK["query"], items=f"{BEST}\n{long}"))
    done(page)
    shown = rows(page)
    assert shown[0][1] == BEST
    assert "prompt_too_long" in shown[1][-1]


def test_text_is_never_markup(page, server):
    nasty = "<img src=x onerror=document.title='hacked'><b>bold</b>"
    page.goto(server.link(query=nasty, items=nasty, labels="<b>yes</b>\nno"))
    done(page)
    assert rows(page)[0][1] == nasty
    assert page.locator("#results b, #results img").count() == 0
    assert "hacked" not in page.title()


def test_the_state_goes_into_the_address_and_back(page, server):
    page.goto(server.url)
    expect(page.locator("#run")).to_be_enabled()
    page.locator("select[name=task]").first.select_option("score")
    page.locator("textarea[name=query]").first.fill("Größe + 1 & 2\nitem: ")
    page.locator("textarea[name=items]").first.fill("a\nb, c")
    page.locator("textarea[name=labels]").first.fill("yes\nno")
    address = page.url
    assert "run" not in address
    other = page.context.new_page()
    other.goto(address)
    assert other.locator("textarea[name=query]").first.input_value() == "Größe + 1 & 2\nitem: "
    assert other.locator("textarea[name=items]").first.input_value() == "a\nb, c"
    page.locator("#link").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    other.goto("about:blank")
    other.goto(copied)
    done(other)


def test_the_fragment_is_never_sent(page, server, seen):
    page.goto(server.link(**{**STATE, "query": "SECRETQUERY"}))
    done(page)
    assert not [url for url in seen.requests[1:] if "SECRETQUERY" in url]


def test_keys(page, guarded, seen, picture):
    """The shell loads without a key; the key is kept in memory only."""
    page.goto(guarded.link(**STATE))
    expect(page.locator("#server")).to_contain_text("API key is required")
    expect(page.locator("#key")).to_be_focused()
    assert page.locator("#results table").count() == 0
    page.keyboard.type(guarded.key)
    page.keyboard.press("Enter")
    done(page)
    assert rows(page)[0][1] == BEST
    expect(page.locator("#code")).to_contain_text("$GPUSCORE_API_KEY")
    stored = page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
    )
    assert guarded.key not in stored
    assert guarded.key not in page.content()
    page.reload()
    expect(page.locator("#server")).to_contain_text("API key is required")


def test_history_only_if_wanted(page, server):
    page.goto(server.link(**STATE))
    done(page)
    assert page.evaluate("localStorage.length") == 0
    page.locator("#keep-history").check()
    page.locator("#run").click()
    expect(page.locator("#earlier li")).to_have_count(1)
    page.goto("about:blank")
    page.goto(server.url)
    page.locator("#earlier button").click()
    expect(page.locator("textarea[name=query]").first).to_have_value(QUERY)
    page.locator("#clear-history").click()
    expect(page.locator("#earlier li")).to_have_count(0)
    assert QUERY not in page.evaluate("JSON.stringify(localStorage)")
    page.locator("#keep-history").uncheck()
    assert page.evaluate("localStorage.length") == 0


def test_the_keyboard_is_enough(page, server):
    page.goto(server.url)
    expect(page.locator("#run")).to_be_enabled()
    visited = []
    for _ in range(40):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.name || document.activeElement.id"))
        if visited[-1] in ("query", "items"):
            page.keyboard.press("Control+A")  # the example
        if visited[-1] == "query":
            page.keyboard.type("a blue chair")
        if visited[-1] == "items":
            page.keyboard.type("A lamp.\nA blue chair.")
            page.keyboard.press("Control+Enter")
            break
    done(page)
    assert {"key", "task", "query", "items"} <= set(visited)
    assert rows(page)[0][1] == "A blue chair."


def test_every_control_has_a_name(page, server):
    """A screen reader has something to say for each."""
    page.goto(server.link(**RERANK, **{"b.query": "x"}))
    done(page)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, a")]
          .filter((one) => one.checkVisibility()
            && !(one.labels?.length && one.labels[0].innerText.trim())
            && !one.textContent.trim() && !one.getAttribute("aria-label"))
          .map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("#results table caption").count() == page.locator("#results table").count()
    assert page.locator("#said").get_attribute("aria-live") == "polite"
    assert page.locator("html").get_attribute("lang") == "en"


SHAPES = [(360, "light"), (1200, "dark")]


@pytest.mark.parametrize(("width", "colours"), SHAPES)
def test_phones_and_colours(page, server, width, colours, picture):
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=colours)
    page.goto(server.link(**STATE, **{"b.query": QUERY, "b.labels": "yes,no", "b.task": "score"}))
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    front, back = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (front, back)]
    assert (light[0] > light[1]) == (colours == "dark")
    assert abs(light[0] - light[1]) > 400


def hidden_columns(page) -> list[bool]:
    """Return for each table whether columns lie outside of it; check that it says so."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".wide")].map((one) => [
          one.scrollWidth > one.clientWidth,
          one.previousElementSibling?.checkVisibility() ?? false])"""
    )
    assert [said for _, said in found] == [hides for hides, _ in found]
    return [hides for hides, _ in found]


def test_no_column_hides_without_a_sign(page, server, picture):
    """The sign comes and goes with the width, as when a phone is turned."""
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(server.link(**STATE))
    done(page)
    sign = page.get_by_text("More columns: scroll the table sideways")
    expect(sign).to_be_visible()
    assert hidden_columns(page) == [True]
    page.set_viewport_size({"width": 1200, "height": 800})
    expect(sign).to_be_hidden()
    assert hidden_columns(page) == [False]
    page.set_viewport_size({"width": 360, "height": 800})
    expect(sign).to_be_visible()


def test_the_back_button_shows_the_state_before(page, server):
    page.goto(server.link(**STATE))
    done(page)
    page.evaluate("location.hash = '#query=another&items=x'")
    expect(page.locator("textarea[name=query]").first).to_have_value("another")
    page.go_back()
    expect(page.locator("textarea[name=query]").first).to_have_value(QUERY)


def test_below_a_path_of_a_proxy(page, server, seen):
    with below_a_path(server.url) as url:
        page.goto(Server(url).link(**RERANK))
        done(page)
        assert rows(page)[0][1] == BEST
        expect(page.locator("#code")).to_contain_text(f"{url}/v1/rerank")
        page.get_by_role("link", name="Status").click()
        expect(page.locator("#replicas tbody tr")).to_have_count(1)
        page.get_by_role("link", name="API").click()
        expect(page.locator("[id*=v1_score]").first).to_be_visible()
    assert all(request.startswith(url) or request.startswith("data:") for request in seen.requests)


def test_a_server_that_is_not_ready_yet(page, server):
    """The first answers come from a server that still loads its model."""
    said = {"error": {"message": "the model is loading", "code": "unavailable", "param": None}}
    first = iter([True, True])
    page.route(
        "**/info?*",
        lambda route: (
            route.fulfill(status=503, json=said) if next(first, False) else route.continue_()
        ),
    )
    page.goto(server.link(**RERANK))
    expect(page.locator("#server")).to_have_text("the model is loading")
    expect(page.locator("#said")).to_have_text("Done.")


def example(page, server: Server) -> None:
    """Run what the page starts with, and the same from the button."""
    page.goto(server.link(run=False))
    expect(page.locator("#run")).to_be_enabled()  # the page knows the model
    query = page.locator("textarea[name=query]").first
    shown = query.input_value()
    assert shown != ""
    query.fill("")
    page.get_by_role("button", name="Example", exact=True).click()
    assert query.input_value() == shown
    page.goto("about:blank")
    page.goto(server.url)
    expect(query).to_have_value(shown)
    assert "#" not in page.url  # an address to remember stays plain
    page.locator("#run").click()
    done(page)
    assert len(rows(page)) >= 3


def test_the_demo_model_is_asked_what_it_was_trained_on(page, server):
    example(page, server)
    assert rows(page)[0][1] == BEST


def test_another_model_is_asked_about_plain_english(page, without_family):
    example(page, without_family)
    assert page.locator("#results thead th").all_inner_texts()[2:4] == ["positive", "negative"]
    assert {row[1].split()[-1] for row in rows(page)} == {"Sentiment:"}
