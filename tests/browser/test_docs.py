"""Promise: /docs works without any network but the server, and sends requests."""

from playwright.sync_api import expect

STATUS = ".live-responses-table tbody .response-col_status"  # of the answer, not of the examples


def test_swagger_ui_without_network(page, server, seen, picture):
    page.goto(f"{server.url}/docs")
    operation = page.locator("#operations-default-v1_score_post, [id*=v1_score]").first
    expect(operation).to_be_visible()
    operation.locator("button").first.click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(STATUS)).to_contain_text("200")
    assert f"{server.url}/v1/score" in seen.requests


def test_with_a_key(page, guarded):
    page.goto(f"{guarded.url}/docs")
    page.get_by_role("button", name="Authorize").first.click()
    page.locator(".modal-ux input").first.fill(guarded.key)
    page.locator(".modal-ux button.authorize").first.click()
    page.locator(".modal-ux .btn-done").first.click()
    operation = page.locator("[id*=v1_models_get]").first
    operation.locator("button").first.click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(STATUS)).to_contain_text("200")
    assert guarded.key not in page.evaluate("JSON.stringify(localStorage)")
