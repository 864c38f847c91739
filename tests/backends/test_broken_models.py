"""Promise: a model directory that is broken in any way is refused with one sentence that says how.

This is the short form, in one process; tests/hostile/test_models.py starts a server for each case.
"""

import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig, RequestLimits
from gpuscore.errors import ConfigError
from gpuscore.prompts.chat import ChatTemplate
from gpuscore.prompts.discovery import find_family, read_classifier_head
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.tokenizer_info import read_tokenizer_info
from support.broken_models import CASES, broken, make_bases
from support.slow import slow

# Each of these takes up to seconds of processor time, so only the long form runs them.
LONG = {f"template-{how}" for how in ("loops", "power", "grows", "brackets")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("good"))


def load(directory, wanted="auto"):
    """Read everything that `gpuscore serve` reads, in its order; return the family's prompts."""
    encoder = TextEncoder.read(directory)
    specials = [] if encoder is None else encoder.markers
    head, _ = read_classifier_head(directory), ChatTemplate.read(directory)
    if encoder is not None:
        read_tokenizer_info(directory, encoder, None)
    family = find_family(wanted, directory, [], specials, head)
    config = ModelConfig(dtype="float32", max_batch_tokens=64)
    backend = create_backend(plan_backend(directory, config))
    try:
        builder = PromptBuilder(encoder, backend.limits, RequestLimits())
        return None if family is None else FamilyPrompts(family, builder)
    finally:
        backend.close()


@pytest.mark.parametrize("base", ["plain", "llama", "moe", "classes", "sentence"])
def test_what_is_broken_here_was_good(bases, base):
    load(bases[base])


NAMES = sorted(CASES.keys() - LONG)
SHORT = NAMES[::3]


@pytest.mark.parametrize("name", [*SHORT, *slow(*(name for name in NAMES if name not in SHORT))])
def test_a_broken_directory(bases, tmp_path, name):
    case = CASES[name]
    directory = broken(case, bases, tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        load(directory, *case.flags[1:])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    for word in case.words:
        assert word in str(error.value)
