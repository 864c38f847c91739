"""Promise: a model directory that is broken in any way is refused with one sentence that says how,
and a server of it ends with exit code 78."""

import json

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
from support import programs
from support.broken_models import CASES, broken, make_bases
from support.slow import slow


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


LONG = {f"template-{how}" for how in ("loops", "power", "grows", "brackets")}  # seconds of CPU time
NAMES = sorted(CASES)
SHORT = sorted(CASES.keys() - LONG)[::3]


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


def test_a_server_of_one_says_so_and_ends(bases, tmp_path):
    directory = broken(CASES["tokenizer.json-dangling"], bases, tmp_path / "model")
    done = programs.run("serve", directory, "--port", "0", "--dtype", "float32")
    assert done.returncode == 78
    log = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [line for line in log if line["level"] != "info"] == [], "a traceback, or a warning"
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith("gpuscore: ")
    assert "tokenizer.json" in line
