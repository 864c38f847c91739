"""The tape backend in an engine process of its own, where certain tokens make it misbehave."""

import gc
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpuscore.backends.base import OutOfMemory, Prepared
from support.tape_backend import TapeBackend

HELD, STUCK, CRASH, DEAD_LOOP, GARBAGE, HALF_FRAME, HUGE_FRAME, FROZEN = range(900, 908)
NO_MEMORY, NO_NUMBER, SLOW, MANY_LAYERS = 908, 909, 910, 911
SLOW_SECONDS = 0.3
LAYER_SECONDS = 0.8

# A file that exists while a held or stuck batch is computed. Removing it ends a held batch.
os.environ.setdefault("TAPE_OF", str(os.getpid()))  # the tests' process; its children inherit this
MARK = Path(tempfile.gettempdir(), f"tape-{os.environ['TAPE_OF']}")


class MischievousTape(TapeBackend):
    """A tape that does what the tokens of a batch ask for when the batch is collected."""

    def extend(self, batch):
        pending = super().extend(batch)
        return pending, set(batch.token_ids.tolist())

    def collect(self, pending):
        scores, tokens = pending
        for token, misbehave in ACTIONS.items():
            if token in tokens:
                misbehave()
        if MANY_LAYERS in tokens:
            for _ in range(4):
                time.sleep(LAYER_SECONDS)
                self.layers_done += 1
        result = super().collect(scores)
        if FROZEN in tokens:
            frozen = np.full_like(result.label_logits, gc.get_freeze_count())
            result = replace(result, label_logits=frozen)
        if NO_NUMBER in tokens:
            result = replace(result, label_logits=np.full_like(result.label_logits, np.nan))
        return result


def _die_quietly():
    raise SystemExit  # not an Exception: it ends the engine's thread, not the process


def _out_of_memory():
    raise OutOfMemory("simulated")


def _hold():
    MARK.touch()
    while MARK.exists():
        time.sleep(0.005)


def _hang():
    MARK.touch()
    time.sleep(3600)


def _write(data):
    os.write(int(sys.argv[2]), data)
    time.sleep(3600)


ACTIONS = {
    HELD: _hold,
    STUCK: _hang,
    SLOW: lambda: time.sleep(SLOW_SECONDS),
    CRASH: lambda: os._exit(9),
    DEAD_LOOP: _die_quietly,
    NO_MEMORY: _out_of_memory,
    GARBAGE: lambda: _write(b"\x03\x00\x00\x00\xc1\xc1\xc1"),
    HALF_FRAME: lambda: _write(b"\xff\xff\xff\x3fabc"),  # a legal size
    HUGE_FRAME: lambda: _write(b"\xff\xff\xff\xff"),
}


def prepare(directory, config, max_tokens=8192):
    options = {"max_tokens": max_tokens, "page_size": 16, "num_pages": 4096, "max_model_len": 4096}
    return Prepared("tape", lambda: MischievousTape(**options))


OTHER_LSE, OTHER_VOCAB = 1.5, 950  # of any directory but the first one's


class OtherTape(MischievousTape):
    """A tape whose scores differ from the first one's, and whose vocabulary is smaller."""

    def __init__(self, **options):
        super().__init__(**options)
        self.limits = replace(self.limits, vocab_rows=OTHER_VOCAB)

    def collect(self, pending):
        result = super().collect(pending)
        return replace(result, lse=result.lse + np.float32(OTHER_LSE))


def by_directory(directory, config):
    """Return a tape, or for the directories of further models another one."""
    first = prepare(directory, config)
    if directory.name == "a":
        return first
    options = {"max_tokens": 8192, "page_size": 16, "num_pages": 4096, "max_model_len": 4096}
    return Prepared("other tape", lambda: OtherTape(**options))


def of_small_batches(directory, config):
    return prepare(directory, config, max_tokens=64)


def refuse(directory, config):
    from gpuscore.errors import ConfigError

    raise ConfigError(f"{directory} is refused")


def break_at_load(directory, config):
    return Prepared("broken", lambda: time.sleep(0.2) or os._exit(5))


def slow_second_load(directory, config):
    """Load in the first child, which leaves a mark; hang in children that find the mark."""
    mark = Path(os.environ["TAPE_MARK"])
    if mark.exists():
        return slow_load(directory, config)
    mark.touch()
    return prepare(directory, config)


def loads_once(directory, config):
    """Load in the first child of each directory; end those that come later."""
    mark = Path(os.environ["TAPE_MARK"], directory.name)
    if mark.exists():
        return break_at_load(directory, config)
    mark.touch()
    return prepare(directory, config)


def hanging_import(directory, config):
    time.sleep(3600)


def slow_load(directory, config):
    return Prepared("slow", lambda: time.sleep(3600))
