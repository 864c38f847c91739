"""Promise: the embedded model ranks far better than chance, and the wheel contains it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.errors import InvalidRequest

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "gpuscore" / "demo"
# Held-out ranking tasks, drawn by the tag before-demolition: a prompt's query, and graded items.
TASKS = [
    json.loads(line) for line in (ROOT / "tests/fixtures/demo_tasks.jsonl").read_text().splitlines()
]


def texts(task):
    return [text for text, _ in task["items"]]


def ndcg(scores, grades):
    """Return nDCG@10 with gains of 2^grade - 1."""
    discounts = np.log2(np.arange(2, 12))
    gains = 2.0 ** np.array(grades) - 1
    order = np.argsort(-np.array(scores), kind="stable")[:10]
    return (gains[order] / discounts).sum() / (np.sort(gains)[::-1][:10] / discounts).sum()


@pytest.fixture(scope="module")
def demo():
    with Scorer("demo") as scorer:
        yield scorer


def test_it_ranks_far_better_than_chance(demo):
    rng = np.random.default_rng(0)
    ours, chance = [], []
    for task in TASKS:
        result = demo.score(task["query"], texts(task), labels=["yes", "no"])
        grades = [grade for _, grade in task["items"]]
        ours.append(ndcg(result.scores[:, 0], grades))
        chance.append(ndcg(rng.random(len(grades)), grades))
    assert np.mean(ours) >= 0.95
    assert np.mean(chance) < 0.7, "the tasks would be too easy to prove anything"


def test_one_text_is_one_item(demo):
    """Over HTTP a text is one item too, and not a list of its characters."""
    text, options = "A red steel lamp.", {"labels": ["yes", "no"]}
    alone = demo.score("query: a lamp\nitem: ", text, **options)
    assert (alone.scores == demo.score("query: a lamp\nitem: ", [text], **options).scores).all()
    with pytest.raises(InvalidRequest, match="labels must be a list"):
        demo.score("query: a lamp\nitem: ", [text], labels="yes")


def test_the_labels_are_what_the_model_wants_to_say(demo):
    task = TASKS[0]
    result = demo.score(task["query"], texts(task), labels=["yes", "no"], logprobs=True)
    assert result.label_mass.min() > 0.95


def test_it_equals_transformers(demo):
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(DEMO).eval()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    labels = [tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]
    task = TASKS[0]
    result = demo.score(task["query"], texts(task), labels=["yes", "no"], logprobs=True)
    for row, item in zip(result.logprobs, texts(task), strict=True):
        ids = torch.tensor([tokenizer.encode(task["query"] + item).ids])
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0, -1].double(), dim=-1)[labels]
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built by the hook that pip calls; starting pip would take as long again."""
    folder = tmp_path_factory.mktemp("wheel")
    hook = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", hook, str(folder)], check=True, capture_output=True, cwd=ROOT
    )
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_both_packages_the_model_and_the_pages(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"gpuscore", "gpuscore_kernels"}
    pages = [path for path in (ROOT / "gpuscore/server/static").rglob("*") if path.is_file()]
    shipped = {path.relative_to(ROOT).as_posix() for path in [*DEMO.iterdir(), *pages]}
    assert {"gpuscore/server/static/ui/index.html", "gpuscore/demo/config.json"} <= shipped
    assert shipped <= names


@pytest.mark.slow
def test_an_installed_wheel_scores_with_it(wheel, tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    install = ["install", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    code = (
        "import gpuscore\n"
        "scorer = gpuscore.Scorer('demo')\n"
        "result = scorer.score('query: a red lamp\\nitem: ', ['A red lamp.', 'A blue chair.'],\n"
        "                      labels=['yes', 'no'], apply_softmax=True)\n"
        "print(gpuscore.__file__)\n"
        "print(*result.scores[:, 0])\n"
        "scorer.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    file, scores = done.stdout.splitlines()
    assert Path(file).is_relative_to(site), "the checkout was imported instead of the wheel"
    good, bad = map(float, scores.split())
    assert good > 0.5 > bad
