"""The servers that `gpuscore bench` measures: at a given address, or started here."""

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from gpuscore.errors import ConfigError, UsageError
from gpuscore.measure.apis import APIS, LABELS, Api
from gpuscore.measure.load import LoadGenerator, Record, authorized
from gpuscore.measure.results import Measured
from gpuscore.measure.scenarios import BenchRequest
from gpuscore.measure.workload import Ids
from gpuscore.types.batch import Float64Array

UNKNOWN = "unknown"
TINY = BenchRequest([5, 6], [[7], [8, 9]])
JSON = {"Content-Type": "application/json"}


class HttpTarget:
    """A server at an address.

    Attributes:
        server: what is known about the server; its scores of the sample are added later.
        wrong: reasons why scores are wrong, by the name of the load mode that they came from.
    """

    def __init__(self, url: str, key: str | None, server: Measured, patience: float) -> None:
        self.server = server
        self._url = url
        self._key = key
        self._patience = patience
        self.wrong: dict[str, str] = {}

    def send(
        self,
        api: Api,
        asks: Sequence[BenchRequest],
        pace: int | Float64Array = 1,
        labels: Ids = LABELS,
    ) -> Record:
        """Send requests; return when all are answered.

        Args:
            pace: requests that are kept in flight, or the seconds at which each is due.
            labels: ids of the labels to score.
        """
        bodies = [api.encode(ask, self.server.model, labels) for ask in asks]
        load = LoadGenerator(httpx.URL(self._url + api.path), self._key, bodies, self._patience)
        return load.closed(pace) if isinstance(pace, int) else load.open(pace)


def inspect_server(name: str, url: str, key: str | None, values: argparse.Namespace) -> HttpTarget:
    """Find out which model and API a server has.

    Args:
        name: what the tables call it.
        values: options that all servers share: `api` (None = the first API that answers),
            `served_model`, `vocab_size`, and `patience` in seconds.

    Raises:
        UsageError: the URL is invalid, or no API answers. The error quotes the server.
    """
    base = url.rstrip("/")
    try:
        http = httpx.Client(
            base_url=base, headers=authorized(key), timeout=values.patience, trust_env=False
        )
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url}: {error}") from error
    with http:
        info = _get_json(http, "/info")
        data = _get_json(http, "/v1/models").get("data")
        first = data[0] if isinstance(data, list) and data else {}
        listed = str(first["id"]) if isinstance(first, dict) and "id" in first else None
        model = values.served_model or listed or str(info.get("model_id", "default"))
        api = _answering(http, url, [values.api] if values.api else list(APIS), model)
    details = info.get("gpuscore")
    details = details if isinstance(details, dict) else {}
    facts = {name: info[name] for name in ("model_id", "model_dtype", "version") if info.get(name)}
    for fact in ("machine", "versions", "commit", "settings"):
        facts[fact] = UNKNOWN if details.get(fact) is None else details[fact]
    reported = details.get("valid_token_ids")
    vocab = values.vocab_size or (reported if isinstance(reported, int) else None)
    dtype = str(info.get("model_dtype", UNKNOWN)).split(" ")[0]
    server = Measured(name, model, dtype, api, vocab=vocab, facts=facts)
    return HttpTarget(base, key, server, values.patience)


def _get_json(http: httpx.Client, path: str) -> dict[str, Any]:
    """Return the JSON object of a route; empty if it is not there."""
    try:
        answer = http.get(path)
        content = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _answering(http: httpx.Client, url: str, names: Sequence[str], model: str) -> str:
    """Return the first API that scores two items, or raise UsageError with all answers."""
    answers = ""
    for name in names:
        api = APIS[name]
        try:
            answer = http.post(api.path, content=api.encode(TINY, model), headers=JSON)
            if answer.status_code == 200:
                api.read(answer.content, TINY)
                return name
            answers = f"{answers}; {api.path} gets {answer.status_code}: {refusal(answer.content)}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"--url {url}: no answer: {error}") from error
        except ValueError as error:
            answers = f"{answers}; {api.path}: {error}"
    raise UsageError(f"--url {url}: no API answers{answers}")


def refusal(body: bytes) -> str:
    """Return the message of a server's error, on one line."""
    text = body.decode(errors="replace")
    try:
        content = msgspec.json.decode(body)
        content = content.get("error", content) if isinstance(content, dict) else content
        text = content.get("message", text) if isinstance(content, dict) else str(content)
    except msgspec.DecodeError:
        pass
    return " ".join(str(text).split())[:200]


@contextmanager
def started(model: str, options: str, patience: float) -> Iterator[str]:
    """Start `gpuscore serve MODEL OPTIONS`; yield its address, and end it.

    The server's request timeout equals the client's, unless OPTIONS set another.

    Raises:
        ConfigError: it does not start. The error quotes its last line.
    """
    command = [*(sys.executable, "-m", "gpuscore", "serve", model), "--port", "0"]
    command += ["--no-log-requests", "--request-timeout", str(patience), *shlex.split(options)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield _ready(process, errors, f"gpuscore serve {model} {options}".strip())
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(process: "subprocess.Popen[str]", errors: Any, command: str) -> str:
    assert process.stdout is not None  # noqa: S101  (a pipe)
    for line in process.stdout:
        if "ready on " in line:
            return line.split("ready on ")[1].split(" ")[0].strip()
    process.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
    raise ConfigError(f"`{command}` did not start: {lines[-1].removeprefix('gpuscore: ')}")
