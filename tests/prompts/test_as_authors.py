"""Promise: every family's prompts and scores are those of its authors' code, token by token.

tests/fixtures/families has the answers of that code to texts that begin and end in every way.
"""

import json

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.config import RequestLimits
from gpuscore.prompts.model import ModelFiles
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.batch import BackendLimits
from support.families import ids_of
from support.family_models import CASES, FOLDER, GUARDS, SCORED, digest, make_directory, pairs

LIMITS = BackendLimits(4096, 16, 4000, 2000, 151_936)
ONE_CLASS = BackendLimits(4096, 16, 4000, 2000, 151_936, classes=("reward",))


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


def test_the_ids_of_the_authors_code(case):
    name, directory, answers = case
    wanted = CASES[name].family or name
    files = ModelFiles.read(directory, wanted, [directory.name])
    family = files.prompts(ONE_CLASS if CASES[name].head else LIMITS, RequestLimits()).family
    got = [ids_of(family.build(RerankInput(q, [d])))[0] for q, d in queries_of(name)]
    assert got[: len(answers["ids"])] == answers["ids"]
    wrong = [
        pair
        for pair, ids, known in zip(pairs(), got, answers["digests"].split(), strict=True)
        if digest(ids) != known
    ]
    assert not wrong, f"{len(wrong)} pairs have other ids, such as {wrong[:3]}"


def test_the_scores_of_the_authors_code(case):
    name, directory, answers = case
    some = queries_of(name)[:SCORED]
    wanted = CASES[name].family or name
    with Scorer(str(directory), family=wanted, threads=1, max_batch_tokens=512) as scorer:
        if name in GUARDS:
            got = [scorer.classify([d], query=q).probabilities[0] for q, d in some]
        else:
            got = scorer.score_pairs(some, raw_scores=CASES[name].raw).scores
    np.testing.assert_allclose(got, answers["scores"], atol=1e-4)
