"""Promise: the playground reads items of files, and what it exports and shows as code is right."""

import csv
import io
import json
import subprocess

import pytest
from playwright.sync_api import expect

from asked import QUERY, RERANK, STATE, done, post, rows


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.csv",
            'id,text\n1,"A lamp, red"\n2,"A ""blue"" chair"\n',
            ["A lamp, red", 'A "blue" chair'],
        ),
        ("a.csv", "A lamp.\nA chair.\n", ["A lamp.", "A chair."]),
        ("a.jsonl", '{"text": "A lamp."}\n{"document": "A\\nchair."}\n', ["A lamp.", "A\nchair."]),
        ("a.json", '["A lamp.", {"text": "A chair."}]', ["A lamp.", "A chair."]),
        ("a.txt", "A lamp.\r\n\r\nA chair.", ["A lamp.", "A chair."]),
    ],
)
def test_items_of_a_file(page, server, name, text, expected):
    page.goto(server.link(run=False, query="a lamp"))
    expect(page.locator("#run")).to_be_enabled()
    chooser = page.locator("input[type=file]").first
    chooser.set_input_files({"name": name, "mimeType": "text/plain", "buffer": text.encode()})
    expect(page.locator("textarea[name=items]").first).not_to_be_empty()
    page.locator("#run").click()
    done(page)
    assert sorted(row[1] for row in rows(page)) == sorted(expected)


def test_a_file_can_be_dropped(page, server):
    page.goto(server.link(run=False, query="a lamp"))
    expect(page.locator("#run")).to_be_enabled()
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["text\\nA lamp."], "x.csv"));
          document.querySelector("textarea[name=items]")
            .dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
        }"""
    )
    expect(page.locator("select[name=format]").first).to_have_value("csv")
    page.locator("#run").click()
    done(page)
    assert [row[1] for row in rows(page)] == ["A lamp."]


def test_a_long_list_is_shown_in_part(page, server):
    items = [f"A lamp {number}." for number in range(1003)]
    page.goto(server.link(run=False, query="a lamp"))
    expect(page.locator("#run")).to_be_enabled()
    page.locator("textarea[name=items]").first.fill("\n".join(items))
    page.locator("#run").click()
    expect(page.locator("#said")).to_have_text("Done.")
    expect(page.locator("#results")).to_contain_text("The first 1,000 of 1,003 rows")
    assert page.locator("#results tbody tr").count() == 1000
    with page.expect_download() as started:
        page.get_by_role("button", name="Export CSV").click()
    text = started.value.path().read_text(encoding="utf-8")
    assert {row["item"] for row in csv.DictReader(io.StringIO(text))} == set(items)


def test_csv(page, server):
    items = '=1+1, "quoted"\nA blue chair.'
    page.goto(server.link(query=QUERY, items=items, labels="yes,no"))
    done(page)
    with page.expect_download() as started:
        page.get_by_role("button", name="Export CSV").click()
    text = started.value.path().read_text(encoding="utf-8")
    exported = list(csv.DictReader(io.StringIO(text)))
    assert len(exported) == 4
    assert {row["item"] for row in exported} == {'\'=1+1, "quoted"', "A blue chair."}
    row = next(row for row in exported if row["item"] == "A blue chair." and row["label"] == "yes")
    body = {"query": QUERY, "items": ["A blue chair."], "labels": ["yes", "no"]}
    assert float(row["probability"]) == pytest.approx(
        post(server, "/v1/score", body)["scores"][0][0], rel=1e-4
    )


def test_the_shown_curl_command_gives_the_shown_answer(page, server):
    page.goto(server.link(**{**STATE, "items": "It's a chair.\nA lamp."}))
    done(page)
    page.locator("#code summary", has_text="curl").click()
    page.locator("#code details[open] button").click()
    command = page.evaluate("navigator.clipboard.readText()")
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    scores = [row[0] for row in json.loads(ran.stdout)["scores"]]
    assert sorted(scores) == pytest.approx(sorted(float(row[2]) for row in rows(page)), abs=6e-5)


@pytest.mark.parametrize(
    "state",
    [
        {**STATE, "items": 'It\'s a "chair".\nA lamp.\\n'},
        RERANK,
        {"task": "classify", "items": "a\nb", "labels": "yes,no"},
    ],
    ids=["score", "rerank", "classify"],
)
def test_the_shown_python_runs(page, server, state, gpuscore_python):
    page.goto(server.link(**state))
    done(page)
    for text in page.locator("#code pre").all_text_contents()[1:]:
        if "gpuscore.client" in text:
            ran = subprocess.run(
                [gpuscore_python, "-P", "-c", text], capture_output=True, text=True
            )
            assert ran.returncode == 0, ran.stderr
        else:
            compile(text, "openai", "exec")
