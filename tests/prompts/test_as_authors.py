"""Promise: every family's prompts and scores are those of its authors' code, token by token.

tests/fixtures/families has the answers of that code to texts that begin and end in every way.
"""

import json

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.backends.common.start_check import Tree
from gpuscore.config import RequestLimits
from gpuscore.prompts.model import ModelFiles
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.batch import BackendLimits
from support.connections import connected
from support.families import ids_of
from support.family_models import CASES, FOLDER, GUARDS, SCORED, digest, make_directory, pairs
from support.serving import serving
from support.slow import slow

LIMITS = BackendLimits(4096, 16, 4000, 2000, 151_936)
ONE_CLASS = BackendLimits(4096, 16, 4000, 2000, 151_936, classes=("reward",))


@pytest.fixture(scope="module", autouse=True)
def quick_starts():
    """Check a start by short requests: every row has logits of a large vocabulary."""
    short = Tree((5, 1, 3, 2), (-1, 0, 0, 0)), Tree((4, 2), (-1, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuscore.backends.torch.backend.TREES", short)
        patch.setattr("gpuscore.backends.common.start_check.CHUNK", 2)
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The family's name, its model's directory and the answers of its authors' code."""
    directory = make_directory(tmp_path_factory.mktemp("family") / "model", request.param)
    answers = json.loads((FOLDER / f"{request.param}.json").read_text())
    return request.param, directory, answers


def queries_of(name):
    """Return the pairs; every second text of a guard answers no query."""
    alone = name in GUARDS
    return [(None if alone and i % 2 else q, d) for i, (q, d) in enumerate(pairs())]


@pytest.mark.parametrize("count", [100, *slow(300)])
def test_the_ids_of_the_authors_code(case, count):
    name, directory, answers = case
    wanted = CASES[name].family or name
    files = ModelFiles.read(directory, wanted, [directory.name])
    family = files.prompts(ONE_CLASS if CASES[name].head else LIMITS, RequestLimits()).family
    got = [ids_of(family.build(RerankInput(q, [d])))[0] for q, d in queries_of(name)[:count]]
    assert files.encoder.text(got[0]) == answers["prompt"]
    assert got[: len(answers["ids"])] == answers["ids"]
    wrong = [
        pair
        for pair, ids, known in zip(pairs(), got, answers["digests"].split(), strict=False)
        if digest(ids) != known
    ]
    assert not wrong, f"{len(wrong)} pairs have other ids, such as {wrong[:3]}"


def test_the_scores_of_the_authors_code(case):
    name, directory, answers = case
    some = queries_of(name)[:SCORED]
    wanted = CASES[name].family or name
    with Scorer(str(directory), family=wanted, threads=1, max_batch_tokens=64) as scorer:
        if name in GUARDS:
            got = [scorer.classify([d], query=q).probabilities[0] for q, d in some]
        else:
            got = scorer.score_pairs(some, raw_scores=CASES[name].raw).scores
    np.testing.assert_allclose(got, answers["scores"], atol=1e-4)


OVER_HTTP = ("sentence-transformers-late", "sentence-transformers-class")
NOT_ON_JAX = ("gemma", "granite", "qwen3_5")


def servers():
    for name, case in CASES.items():
        quick = () if name in OVER_HTTP else (pytest.mark.slow,)
        yield pytest.param(name, "torch", marks=quick)
        if case.model not in NOT_ON_JAX:
            yield pytest.param(name, "jax", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "backend"), [*servers()])
def test_the_scores_over_http(tmp_path, name, backend):
    """Twice, packed with other documents: the second time with what the first one cached."""
    directory = make_directory(tmp_path / "model", name)
    answers = json.loads((FOLDER / f"{name}.json").read_text())
    others = [document for _, document in pairs()[SCORED : SCORED + 20]]
    arguments = [str(directory), "--backend", backend, "--device", "cpu", "--dtype", "float32"]
    arguments += ["--family", CASES[name].family or name]
    arguments += ["--threads", "1"] * (backend == "torch")
    arguments += ["--max-batch-tokens", "128"]  # each row has logits of a large vocabulary
    with serving(*arguments) as server, connected(server) as client:
        for index in (*range(SCORED), 0):
            query, document = queries_of(name)[index]
            texts, raw = [*others, document], CASES[name].raw
            if name in GUARDS:
                body = {"query": query, "input": texts}
                score = client.post("/v1/classify", json=body).json()["data"][-1]["probs"]
            else:
                body = {"query": query, "documents": texts, "raw_scores": raw}
                results = client.post("/v1/rerank", json=body).json()["results"]
                score = {row["index"]: row["relevance_score"] for row in results}[len(others)]
            assert score == pytest.approx(answers["scores"][index], abs=1e-4)
