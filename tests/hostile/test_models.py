"""Promise: a server of a broken model directory ends with exit code 78 and one sentence within 20
s. tests/backends/test_broken_models.py reads all broken directories."""

import time

import pytest

from support import programs
from support.broken_models import CASES, broken, make_bases

EXIT_CONFIG, SECONDS = 78, 20
# In earlier versions the first hung before the port was bound, the second was served as if it had
# no tokenizer, the third ended in a traceback.
SHORT = ("template-loops", "tokenizer.json-dangling", "config.json-nested")
MORE = (
    *("tokenizer.json-loop", "chat_template.jinja-pipe", "model.safetensors-pipe"),
    *("template-power", "template-grows", "template-range", "template-large", "template-itself"),
    *("weights-truncated", "header-absurd", "offsets-overlap", "shape-absurd", "huge-vocab_size"),
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.hostile) for name in MORE)]
)
def test_a_server_of_a_broken_directory(bases, tmp_path, name):
    case = CASES[name]
    directory = broken(case, bases, tmp_path / "model")
    start = time.monotonic()
    words = ("serve", str(directory), "--port", "0", "--dtype", "float32", *case.flags)
    done = programs.run(*words)
    seconds = time.monotonic() - start
    assert done.returncode == EXIT_CONFIG, done.stderr
    log = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert not [line for line in log if '"level":"info"' not in line], "a traceback, or a warning"
    (line,) = [line for line in done.stderr.splitlines() if line not in log]
    assert line.startswith("gpuscore: ")
    for word in case.words:
        assert word in line
    assert seconds < SECONDS
