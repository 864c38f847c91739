"""Promise: the soak tells a wrong answer from a right one, and growth from noise."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from soak_page import Verdict, write_page
from soak_requests import same, table
from soak_vitals import MIB, Process, Sample, growth

ANSWER = {"scores": [[0.9, 0.1], [1e-6, 0.5]], "usage": {"cached_tokens": 3}, "object": "scoring"}
RANKED = {"results": [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.4}]}


@pytest.mark.parametrize(
    ("expected", "got", "right"),
    [
        (ANSWER, ANSWER | {"usage": {"cached_tokens": 0}}, True),
        (ANSWER, ANSWER | {"scores": [[0.90001, 0.1], [1.0001e-6, 0.5]]}, True),
        (ANSWER, ANSWER | {"scores": [[0.9, 0.1], [2e-6, 0.5]]}, False),
        (ANSWER, ANSWER | {"scores": [[0.9, 0.1]]}, False),
        (ANSWER, ANSWER | {"scores": [[0.1, 0.9], [1e-6, 0.5]]}, False),
        (ANSWER, ANSWER | {"more": 1}, False),
        (RANKED, {"results": RANKED["results"][::-1]}, True),
        (RANKED, {"results": [{"index": 1, "score": 0.4}, {"index": 0, "score": 0.9}]}, False),
        ({"logprob": -3.0}, {"logprob": -3.0001}, True),
        ({"logprob": -3.0}, {"logprob": -3.001}, False),
        ({"text": "a"}, {"text": "b"}, False),
        ({"tokens": [1, 2]}, {"tokens": [1, 2.0]}, False),
    ],
)
def test_answers_are_compared(expected, got, right):
    assert same(expected, got) is right


def samples(server, engine, lives=1, minutes=60):
    """Return samples of two processes that grow by `server` and `engine` MiB per hour; `lives`
    engines of different sizes follow each other."""
    rng = np.random.default_rng(3)
    taken = []
    for second in range(0, 60 * minutes, 5):
        life = second * lives // (60 * minutes)
        noise, hours = rng.normal(0, 0.2, 2) * MIB, second / 3600 * MIB
        processes = (
            Process(1, round(80 * MIB + server * hours + noise[0]), 9, 9),
            Process(2 + life, round((300 + 40 * life) * MIB + engine * hours + noise[1]), 4, 8),
        )
        taken.append(Sample(second, *processes, 100, 0.001, 0.01, 0.5))
    return taken


@pytest.mark.parametrize(("grown", "right"), [(0.0, True), (-9.0, True), (5.0, False)])
@pytest.mark.parametrize("lives", [1, 6])
def test_growth_is_told_from_noise(grown, right, lives):
    drawn_samples = samples(0.0, grown, lives)
    assert growth(drawn_samples, "server").within_noise
    slope = growth(drawn_samples, "engine")
    assert slope.within_noise is right
    assert slope.value == pytest.approx(grown, abs=4 * slope.error)


def test_few_samples_give_no_growth():
    assert growth(samples(0.0, 0.0)[:4], "server") is None


def test_the_page_stands_alone_and_is_small(tmp_path):
    drawn_samples = samples(0.0, 0.0, lives=4)
    verdicts = [Verdict("wrong", False, "1 < 2")]
    page = tmp_path / "page.html"
    facts, faults = {"seed": "3"}, [(900.0, "SIGKILL")]
    write_page(page, "Soak", facts, verdicts, {"score 200": 3}, drawn_samples, faults, ["<b>"])
    text = page.read_text()
    assert len(text) < 300_000
    assert text.count("<tr>") > 30
    assert text.count("SIGKILL") == 1
    assert '<span class="failed">failed</span>' in text
    assert "1 &lt; 2" in text
    assert "&lt;b&gt;" in text
    assert "src=" not in text
    assert "href=" not in text


def test_requests_are_seeded():
    first, other = (table(np.random.default_rng(7), 500) for _ in range(2))
    assert first == other
    assert sum(known.weight for known in first) == pytest.approx(0.99)
