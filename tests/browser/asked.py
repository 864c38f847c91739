"""Requests of the tests, with and without the page, and the page's results."""

import json
import urllib.request

from playwright.sync_api import Page, expect

from conftest import Server

QUERY = "query: a blue wooden chair for the garden\nitem: "
ITEMS = ["A red steel lamp.", "A wooden garden chair in blue.", "A blue wool scarf."]
BEST = ITEMS[1]
STATE = {"query": QUERY, "items": "\n".join(ITEMS), "labels": "yes,no"}
RERANK = {"query": "a blue wooden chair for the garden", "items": "\n".join(ITEMS)}


def post(server: Server, path: str, body: object) -> dict:
    """Ask the server without the page."""
    fields = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    asked = urllib.request.Request(server.url + path, json.dumps(body).encode(), fields)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def rows(page: Page, within: str = "#results .run") -> list[list[str]]:
    """Return the cells of a result's table."""
    page.wait_for_selector(f"{within} table")
    table_rows = page.locator(f"{within} tbody tr").all()
    return [
        [cell.inner_text().strip() for cell in row.locator("th, td").all()] for row in table_rows
    ]


def done(page: Page) -> None:
    expect(page.locator("#said")).to_have_text("Done.")
