"""Promise: the comparisons of this folder fail for defects that are planted in a copy of the real
model: a wrong RoPE base, a tied head that is untied, a chat template without a turn."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.errors import ConfigError
from gpuscore.measure.gates import judge
from gpuscore.measure.runs import score_case
from reference import MODEL, PASSAGES
from support.golden import scored

NAME = "question 1"


@pytest.fixture
def copy(tmp_path):
    """A directory with links to the model's files, which tests replace."""
    for path in MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    return tmp_path


def replace_file(directory, name, content):
    (directory / name).unlink()
    (directory / name).write_text(content, encoding="utf-8")


def change_config(directory, **fields):
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    replace_file(directory, "config.json", json.dumps(config | fields))


def failed_gates(directory, bundle):
    (case,) = (case for case in bundle.workload.cases if case.name == NAME)
    with Scorer(str(directory), device="cpu", dtype="float32", threads=1) as scorer:
        changed = scored({NAME: score_case(scorer, case)}, bundle)
    return {verdict.gate for verdict in judge(bundle, changed)[1] if verdict.failed}


def test_without_a_defect(copy, bundle):
    assert not failed_gates(copy, bundle)


def test_a_wrong_base_of_rope(copy, bundle):
    change_config(copy, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    assert "float32" in failed_gates(copy, bundle)


def test_a_tied_head_that_is_untied(copy, bundle):
    """Without a matrix of its own the model is refused; with another one its scores are wrong."""
    change_config(copy, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match="lm_head"):
        failed_gates(copy, bundle)
    tensors = load_file(MODEL / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)
    (copy / "model.safetensors").unlink()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert "float32" in failed_gates(copy, bundle)


def test_a_template_without_a_turn(copy):
    """The template puts a system's turn before the first one of a user."""
    template = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    without = template.replace("messages[0]['role'] != 'system'", "false")
    assert without != template
    scores = []
    for directory in (MODEL, copy):
        with Scorer(
            str(directory), device="cpu", dtype="float32", threads=1, family="instruct"
        ) as scorer:
            ranking = scorer.rerank("What is a label?", PASSAGES[:4])
        scores.append([s for _, s in sorted(zip(ranking.indices, ranking.scores, strict=True))])
        replace_file(copy, "chat_template.jinja", without)
    assert np.abs(np.diff(np.log(scores), axis=0)).max() > 1e-2, (
        "over a hundred times the tolerance"
    )
