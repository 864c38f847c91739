"""Promise: the embedded model ranks far better than chance, and the wheel contains it."""

import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from demo.decisions import draw_typed_group
from demo.synthetic import (
    draw_ranking_tasks,
    draw_training_group,
    is_held_out,
    ndcg_at_k,
    prompt_query,
)
from gpuscore import Scorer
from gpuscore.errors import InvalidRequest
from support.slow import slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "gpuscore" / "demo"
TEST_SEED = 2026  # differs from the seeds of training and of its own evaluation


@pytest.fixture(scope="module")
def demo():
    with Scorer("demo") as scorer:
        yield scorer


@pytest.mark.parametrize("count", [15, *slow(40)])
def test_it_ranks_far_better_than_chance(demo, count):
    rng = np.random.default_rng(0)
    ours, chance = [], []
    for task in draw_ranking_tasks(TEST_SEED, count):
        result = demo.score(prompt_query(task.query_text), task.item_texts, labels=["yes", "no"])
        ours.append(ndcg_at_k(result.scores[:, 0].tolist(), task.relevance, 10))
        order = rng.random(len(task.item_texts)).tolist()
        chance.append(ndcg_at_k(order, task.relevance, 10))
    print(
        f"\nnDCG@10 on {len(ours)} held-out tasks: {np.mean(ours):.3f}, "
        f"random order {np.mean(chance):.3f}"
    )
    assert np.mean(ours) >= 0.95
    assert np.mean(chance) < 0.7, "the task would be too easy to prove anything"


def test_one_text_is_one_item(demo):
    """Over HTTP a text is one item too, and not a list of its characters."""
    text, options = "A red steel lamp.", {"labels": ["yes", "no"]}
    alone = demo.score("query: a lamp\nitem: ", text, **options)
    assert (alone.scores == demo.score("query: a lamp\nitem: ", [text], **options).scores).all()
    with pytest.raises(InvalidRequest, match="labels must be a list"):
        demo.score("query: a lamp\nitem: ", [text], labels="yes")


def test_training_never_sees_a_held_out_combination():
    rng = random.Random(0)
    for number in range(300):
        group = draw_training_group(rng, 1, long_text=number % 3 == 0, plain=number % 5 == 0)
        assert not is_held_out(group.query.requested)
        assert not is_held_out(draw_typed_group(rng, 1, plain=number % 5 == 0).combination)
        assert is_held_out(draw_typed_group(rng, 1, held_out=True).combination)


def test_ndcg():
    assert ndcg_at_k([3, 2, 1], [3, 1, 0], 10) == 1
    assert ndcg_at_k([1, 2, 3], [3, 1, 0], 1) == 0
    # By hand: gains 1, 7, 0 at discounts 1, log2(3), 2; the best order has gains 7, 1, 0.
    expected = (1 + 7 / np.log2(3)) / (7 + 1 / np.log2(3))
    assert ndcg_at_k([2, 3, 1], [3, 1, 0], 10) == pytest.approx(expected)


def test_the_labels_are_what_the_model_wants_to_say(demo):
    task = draw_ranking_tasks(TEST_SEED, 1)[0]
    result = demo.score(
        prompt_query(task.query_text), task.item_texts, labels=["yes", "no"], logprobs=True
    )
    assert result.label_mass.min() > 0.95


def test_it_equals_transformers(demo):
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(DEMO).eval()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    labels = [tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]
    task = draw_ranking_tasks(TEST_SEED, 1)[0]
    result = demo.score(
        prompt_query(task.query_text), task.item_texts, labels=["yes", "no"], logprobs=True
    )
    for row, item in zip(result.logprobs, task.item_texts, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt_query(task.query_text) + item).ids])
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
