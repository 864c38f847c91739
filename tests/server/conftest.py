"""Servers that the tests of this folder share, and the canary around a test."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

import gpuscore
from support.connections import KEYS, POISON, canary, connected
from support.models import make_model
from support.serving import QUICK, RunningServer, serving
from support.tape_engine import HELD
from support.tape_servers import in_flight, let_go, tape_server
from support.watched_server import ALICE, BOB, Watched, collector


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    """A model whose text prompts begin with <s>; its tokenizer.json asks for truncation and
    padding, which the server must ignore."""
    directory = tmp_path_factory.mktemp("served")
    made = make_model(directory, "llama")
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(path)
    return directory, made


@pytest.fixture(scope="session")
def encode(model):
    """A function that encodes a text as the contract says: by tokenizer.json without truncation and
    padding."""
    tokenizer = Tokenizer.from_file(str(model[0] / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="session")
def server(model) -> Iterator[RunningServer]:
    flags = ("--threads", "1", "--allowed-hosts", "*")
    with serving(f"tiny={model[0]}", *flags) as running:  # tests call it many names
        yield running


@pytest.fixture(scope="session")
def client(server) -> Iterator[httpx.Client]:
    """A client of the server with default limits and no key."""
    with connected(server) as opened:
        yield opened


@pytest.fixture(scope="session")
def demo() -> Iterator[httpx.Client]:
    """A client of a server that runs the demo model."""
    with serving("demo", *QUICK) as running, connected(running) as opened:
        yield opened


@pytest.fixture(scope="session")
def deterministic() -> Iterator[httpx.Client]:
    """A client of a server whose answers can be compared bit for bit."""
    with serving("demo", *QUICK, "--deterministic") as running, connected(running) as opened:
        yield opened


@pytest.fixture(scope="session")
def limited_server(tmp_path_factory) -> Iterator[RunningServer]:
    """A server with three keys, low limits, short timeouts, and a model with a label
    whose logit is infinite."""
    directory = tmp_path_factory.mktemp("limited")
    poisoned = make_model(directory)
    with torch.no_grad():
        poisoned.lm_head.weight[POISON] = torch.finfo(torch.float32).max
    poisoned.save_pretrained(directory)
    key_file = tmp_path_factory.mktemp("keys") / "keys.txt"
    key_file.write_text(f"{KEYS[1]}\r\n\n  {KEYS[2]}  \n", encoding="utf-8")
    flags = {
        "--threads": 1,
        "--api-key-file": key_file,
        "--max-inflight-per-key": 1,
        "--max-queued-requests": 2,
        "--max-body-bytes": 2**20,
        "--max-header-bytes": 2048,
        "--client-timeout": 1,
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    with serving(directory, *arguments, environment={"GPUSCORE_API_KEY": KEYS[0]}) as running:
        yield running


@pytest.fixture(scope="session")
def limited(limited_server) -> Iterator[httpx.Client]:
    with connected(limited_server, KEYS[0]) as opened:
        yield opened


@pytest.fixture
def stranger(limited_server) -> Iterator[httpx.Client]:
    """A client without a key of a server that needs one."""
    with connected(limited_server) as opened:
        yield opened


@pytest.fixture(scope="module")
def full() -> Iterator[httpx.Client]:
    """A client of a server that accepts one request at a time, and bodies of a megabyte."""
    limits = {"server": {"max_body_bytes": 10**6}, "engine": {"max_queued_requests": 1}}
    with tape_server(**limits) as (_, opened):
        yield opened


@pytest.fixture
def busy(full) -> Iterator[httpx.Client]:
    """A client of that server while it has a request."""
    with in_flight(full, HELD) as held:
        yield full
        assert let_go(held).status == 200


@pytest.fixture
def small_batches(monkeypatch) -> None:
    """Make each Scorer of a program start as soon as QUICK's servers do."""
    quick = partial(gpuscore.Scorer, threads=1, max_batch_tokens=512)
    monkeypatch.setattr(gpuscore, "Scorer", quick)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def first_answers() -> dict[str, str]:
    """Each server's first answer to the canary, by fixture name."""
    return {}


@pytest.fixture(scope="module")
def servers_used(first_answers) -> Iterator[dict[str, httpx.Client]]:
    """The clients of the servers that `unharmed` checks, by fixture name."""
    used: dict[str, httpx.Client] = {}
    yield used
    for name, client in used.items():
        assert canary(client) == first_answers[name]


@pytest.fixture
def unharmed(request, servers_used, first_answers) -> None:
    """Check after the file's tests that each server they used answers the canary as at first, bit
    for bit."""
    for name in ("client", "limited"):
        if name in request.fixturenames:
            servers_used[name] = request.getfixturevalue(name)
            if name not in first_answers:
                first_answers[name] = canary(servers_used[name])


@pytest.fixture(scope="session")
def watched(model, tmp_path_factory) -> Iterator[Watched]:
    """A server with two keys and short timeouts, its log, and a collector of its traces."""
    directory = tmp_path_factory.mktemp("watched")
    keys, log = directory / "keys", directory / "log"
    keys.write_text(f"{ALICE}\n{BOB}\n", encoding="utf-8")
    flags = {
        "--threads": 1,
        "--api-key-file": keys,
        "--max-body-bytes": 2**20,
        "--max-header-bytes": 2048,
        "--client-timeout": 1,
        "--request-timeout": 20,
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    with (
        collector() as (endpoint, traces),
        serving(
            f"tiny={model[0]}",
            *arguments,
            "--kv-cache-size",
            "16MiB",
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"},
            log=log,
        ) as server,
        connected(server, ALICE) as client,
    ):
        yield Watched(server.url, client, log, traces)
