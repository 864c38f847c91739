"""Promise: README and the tasks show what SmolLM2-135M-Instruct answers, and what they
say that it can and cannot judge is counted here."""

from pathlib import Path

import httpx
import pytest

from support.pages import (
    DIALECTS,
    HERE,
    ROOT,
    TASKS,
    ShownRequest,
    blocks,
    compare_numbers,
    run_example,
    run_program,
    shown_requests,
)

SHOWN = shown_requests(real=True)
ANSWERS = {
    "How do I bake bread?": "Knead the dough, let it rise for two hours, and bake it for "
    "40 minutes.",
    "How do I look after tomato plants?": "Water tomato plants in the morning and keep their "
    "leaves dry.",
    "What is the capital of France?": "Paris is the capital of France.",
    "Why is the sky blue?": "Air scatters blue light more than red light, so the sky looks blue.",
    "What are the symptoms of the flu?": "Flu often begins with a fever, a dry cough and aching "
    "muscles.",
    "How do I reset my password?": "To reset your password, open the settings and choose Security.",
    "When does the museum open?": "The museum is open from ten to six, except on Mondays.",
    "How far away is the moon?": "The moon is about 384,000 kilometres from the earth.",
    "Where do penguins live?": "Penguins live in Antarctica and on the coasts of South America.",
    "How do I change a bicycle tyre?": "Take the wheel off the bicycle, and lever the tyre over "
    "the rim.",
    "How do I return an order?": "You can return an order within 30 days; we pay the postage.",
    "What do cats eat?": "Cats eat meat; most cat food is made of chicken or fish.",
    "Who wrote Hamlet?": "Shakespeare wrote Hamlet around the year 1600.",
    "How do planes fly?": "The wings of a plane push air down, and that lifts the plane.",
    "How much sleep do children need?": "Children of school age need nine to eleven hours of "
    "sleep.",
    "How do I remove a coffee stain?": "Rinse a coffee stain with cold water, then use soap.",
    "How is glass made?": "Glass is made by melting sand with soda and lime.",
    "What causes earthquakes?": "Earthquakes happen when plates of the earth's crust slip.",
    "How do I learn the guitar?": "Begin the guitar with three chords and play them every day.",
    "How do vaccines work?": "A vaccine shows the body a harmless part of a virus, and it makes "
    "antibodies.",
}
GOOD = [
    *("I love this phone, the battery lasts for days.", "What a wonderful concert!"),
    *("The room was clean and quiet.", "Friendly staff and a great breakfast."),
    *("Fits perfectly and looks beautiful.", "My children play with it every day."),
    *("The best bread in town.", "Easy to set up and fast.", "Thank you for a lovely evening!"),
    "Delicious food at a fair price.",
]
BAD = [
    *("The soup was cold and the waiter was rude.", "I have waited three weeks for my refund."),
    *("It broke after two days, and nobody answers my letters.", "They sent the wrong size twice."),
    *("A boring film with a stupid end.", "The worst hotel that I have ever seen."),
    *("It smells of oil and scratches the floor.", "The shoes fell apart in the first rain."),
    *("Much too loud, and the screen flickers.", "I will never buy here again."),
]
NOT_BAD = [
    "The film was not bad at all.",
    "I have nothing to complain about.",
    "Nobody was disappointed.",
]
NOT_GOOD = ["The food was not good.", "I would not call this a success.", "It did not work once."]


@pytest.mark.parametrize("shown", SHOWN, ids=[f"{entry.page}-{i}" for i, entry in enumerate(SHOWN)])
def test_requests_are_answered_as_shown(real: httpx.Client, shown: ShownRequest) -> None:
    got = real.post(shown.path, json=shown.body)
    assert got.status_code == 200, got.text
    if shown.answer is not None:
        compare_numbers(got.text, shown.answer)


def test_the_program_prints_what_is_shown(
    real: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = TASKS / "replace-a-server.md"
    (program,) = blocks(page, "python")
    run_program(program.replace(HERE, str(real.base_url)), tmp_path)
    assert capsys.readouterr().out in blocks(page, "text")


def test_scores_at_every_colon_are_printed_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DIALECTS / "score.md"
    (program,) = (block for block in blocks(page, "python") if "extraction_token_id" in block)
    monkeypatch.chdir(ROOT)
    run_program(program, tmp_path)
    assert capsys.readouterr().out in blocks(page, "text")


def test_a_threshold_is_chosen_and_used_as_shown(
    real: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, url = TASKS / "guard.md", str(real.base_url).rstrip("/")
    monkeypatch.chdir(tmp_path)
    (commands,) = (block for block in blocks(page, "sh") if "reviews.py" in block)
    _, make, choose = commands.replace(HERE, url).splitlines()
    example, file = make.split(" > ")
    Path(file).write_text(run_example(example, monkeypatch, capsys))
    chosen, used = blocks(page, "text")[-2:]
    assert run_example(choose, monkeypatch, capsys) == chosen
    (program,) = blocks(page, "python")
    assert f"THRESHOLD = {chosen.split()[1].rstrip(',')}\n" in program
    run_program(program.replace(HERE, url), tmp_path)
    assert capsys.readouterr().out == used


def test_what_it_says_of_relevance(real: httpx.Client) -> None:
    documents = list(ANSWERS.values())
    above = 0
    for number, query in enumerate(ANSWERS):
        answer = real.post("/v1/rerank", json={"query": query, "documents": documents}).json()
        place = [result["index"] for result in answer["results"]].index(number)
        above += len(documents) - 1 - place
    pairs = len(ANSWERS) * (len(documents) - 1)
    said = f"in {above / pairs:.0%} of {pairs} pairs".replace("%", " %")
    assert said in " ".join((TASKS / "replace-a-server.md").read_text(encoding="utf-8").split())


def test_what_it_says_of_reviews(real: httpx.Client) -> None:
    """20 of 20 hold for both prompts of the guard's page, six negations for the second."""
    guard = [entry.body for entry in SHOWN if entry.page == "guard"]
    for body, texts in ((guard[0], GOOD + BAD), (guard[1], [*GOOD, *NOT_BAD, *BAD, *NOT_GOOD])):
        frame = body["input"][0].replace(GOOD[0], "{}")
        asked = body | {"input": [frame.replace("{}", text) for text in texts]}
        labels = [
            classified["label"]
            for classified in real.post("/v1/classify", json=asked).json()["data"]
        ]
        half = len(texts) // 2
        assert labels == [" positive"] * half + [" negative"] * half
