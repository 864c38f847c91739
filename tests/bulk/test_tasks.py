"""Promise: without labels, rows go into the prompts of the model's family, or are scored for all of
its classes; options that do not fit the model are refused before rows are read."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from gpuscore.errors import ConfigError
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily
from gpuscore.prompts.model import ModelPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.labels import label_logprobs
from support.batch_jobs import fake_model, make_rows, read_jsonl, run, write_jsonl
from support.slow import slow

RANKER = PromptFamily(
    "ranker",
    "tests",
    ("{instruction} {query} item: ", "{document}"),
    ("yes", "no"),
    instruction="judge",
)
GUARD = PromptFamily("guard", "tests", ("text: ", "{document}"), ("yes", "no"), ("safe", "unsafe"))
ROWS = make_rows(60, queries=9)


def model_of(family):
    @contextmanager
    def loading():
        with fake_model() as model:
            builder = model.prompts.builder
            yield replace(model, prompts=ModelPrompts(builder, FamilyPrompts(family, builder)))

    return loading


def alone(family, rows, instruction=None):
    """Return each row's result from a request of its own."""
    with model_of(family)() as model:
        for row in rows:
            query = row["query"] if family.ranks else None
            given = RerankInput(query, [row["item"]], instruction)
            (future,) = model.engine.score_all([model.prompts.family.build(given).request])
            yield model.prompts.family, future.result()


@pytest.mark.parametrize("instruction", [*slow(None), "find lamps"])
def test_rerankers_give_relevances(tmp_path, instruction):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    run(source, tmp_path / "out.jsonl", model_of(RANKER), labels=None, instruction=instruction)
    found = [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")]
    want = [
        prompts.family.relevance(prompts.raw_scores(result)).tolist()
        for prompts, result in alone(RANKER, ROWS, instruction)
    ]
    np.testing.assert_allclose(found, want, rtol=1e-9)


def test_guards_give_the_probability_of_each_class(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    run(source, tmp_path / "out.jsonl", model_of(GUARD), labels=None, query_column=None)
    found = [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")]
    raw = np.concatenate([prompts.raw_scores(result) for prompts, result in alone(GUARD, ROWS)])
    np.testing.assert_allclose(np.array(found)[:, 0], 1 / (1 + np.exp(-raw)), rtol=1e-9)
    np.testing.assert_allclose(np.sum(found, axis=1), 1)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (RANKER, {"query_column": None}, "--query-column is missing: prompts of ranker"),
        (GUARD, {}, "--query-column: prompts of guard have no query"),
        (GUARD, {"query_column": None, "instruction": "x"}, "--instruction: prompts of guard"),
    ],
)
def test_options_that_do_not_fit_the_family(tmp_path, family, options, message):
    source = write_jsonl(tmp_path / "in.jsonl", [b"{bad"])
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "out.jsonl", model_of(family), labels=None, **options)


@pytest.mark.parametrize("mean", ["none", "mean"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "labels",
    [
        {"labels": ("yes", "yes and no", "no")},
        {"labels": None, "label_sequences": ((294,), (294, 12), (7,))},
    ],
)
def test_labels_of_several_tokens(tmp_path, labels, full, mean):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    more = {"apply_softmax": not full, "label_length_normalization": mean}
    run(source, tmp_path / "out.jsonl", **labels, **more)
    found = [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")]
    want = []
    with fake_model() as model:
        for row in ROWS:
            given = ScoreInput(row["query"], [row["item"]], **labels)
            request = model.prompts.builder.build(given)
            (future,) = model.engine.score_all([request])
            (logprobs,) = label_logprobs(future.result())
            values = logprobs / request.trie.lengths if mean == "mean" else logprobs
            shares = np.exp(values)
            want.append(shares if full else shares / shares.sum())
    np.testing.assert_allclose(found, want, rtol=1e-4)
