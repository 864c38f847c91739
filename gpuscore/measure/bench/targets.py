"""Targets of measurements: a server at an address or started here, or `Scorer` in process."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import httpx
import msgspec

from gpuscore.config import API_KEY_VARIABLE, ModelConfig
from gpuscore.config.options import changed
from gpuscore.errors import ConfigError, GpuscoreError, UsageError
from gpuscore.measure.bench.apis import APIS, LABELS, WORDS, Api
from gpuscore.measure.bench.load import Address, ClosedLoop, LoadLoop, OpenLoop, Record
from gpuscore.measure.bench.scenarios import BenchRequest, Ids
from gpuscore.measure.parity.workload import SAMPLE_IDS
from gpuscore.system.machine import commit, local_machine, versions
from gpuscore.types.batch import Float64Array

UNKNOWN = "unknown"
SAFE_VOCAB = SAMPLE_IDS  # ids to use if their number is unknown; most models have these
TRIED = ("score", "generative", "completions", "rerank", "tei", "pairs")  # in this order
TINY: tuple[BenchRequest, BenchRequest] = (
    BenchRequest([5, 6], [[7], [8, 9]]),
    BenchRequest("a blue", [" chair", " lamp"]),
)
FEWEST_WORDS = 20
HERE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class About:
    """A server's description: its own facts, and facts that the command found out.

    Attributes:
        name: of the run, as in the tables.
        api: name of the API that is timed.
        model: its name.
        vocab: number of valid token ids; None: not told.
        dtype: "float32", another format, or "unknown".
        facts: machine, versions and settings, for people.
        texts: how the lengths of texts were confirmed; None: token ids are sent.
    """

    name: str
    api: str
    model: str
    vocab: int | None
    dtype: str
    facts: dict[str, Any] = field(default_factory=dict)
    texts: str | None = None


class Answerer(Protocol):
    """Something that answers requests."""

    about: About
    words: Sequence[str] | None  # texts of one token each, if texts are sent
    on_gpu: bool  # this machine's only GPU does the work, so its sensors tell of it

    def send(
        self,
        api: Api,
        asks: Sequence[BenchRequest],
        clients: int = 1,
        offsets: Float64Array | None = None,
        labels: Ids = LABELS,
    ) -> Record:
        """Send requests, `clients` at a time or at given times; return when all are answered."""
        ...


class HttpTarget:
    """A server at an address."""

    def __init__(
        self, address: Address, about: About, words: Sequence[str] | None, patience: float
    ) -> None:
        self.about, self.words = about, words
        self.on_gpu = address.host in HERE and _may_use_gpu(about)
        self._address, self._patience = address, patience

    def send(
        self,
        api: Api,
        asks: Sequence[BenchRequest],
        clients: int = 1,
        offsets: Float64Array | None = None,
        labels: Ids = LABELS,
    ) -> Record:
        bodies = [api.encode(ask, self.about.model, labels) for ask in asks]
        where = (self._address, api.path, bodies, self._patience)
        loop: LoadLoop = (
            ClosedLoop(*where, clients) if offsets is None else OpenLoop(*where, offsets)
        )
        return loop.run()


def _may_use_gpu(about: About) -> bool:
    """Return whether this machine has one GPU, and the server does not say that it uses another."""
    gpus = local_machine().get("gpus", ())
    return len(gpus) == 1 and " on cpu" not in about.facts.get("model_dtype", "")


def meet(
    name: str,
    url: str,
    key: str | None,
    api: str | None,
    model: str | None,
    vocab: int | None,
    patience: float,
) -> HttpTarget:
    """Find out what a server is by asking it.

    Args:
        name: of the run.
        url, key: of the server.
        api: a name of `APIS`; None: the first that answers.
        model: its name in requests; None: the first of /v1/models.
        vocab: number of valid token ids; None: as /info tells.
        patience: seconds for an answer.

    Raises:
        UsageError: the URL is invalid, or no API answers; with the server's words.
    """
    address = Address.read(url, key)
    with httpx.Client(
        base_url=url.rstrip("/"),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=patience,
        trust_env=False,
    ) as http:
        info = _told(http, "/info")
        served = model or _first_model(http) or str(info.get("model_id", "default"))
        ours = info.get("gpuscore")
        ours = ours if isinstance(ours, dict) else {}
        tried = (api,) if api else ("tei",) if info and not ours else TRIED
        chosen = _answering(http, url, tried, served)
        words, texts = (None, None) if chosen.takes_ids else _words(http, served)
    told = ours.get("valid_token_ids")
    about = About(
        name,
        chosen.name,
        served,
        vocab or (told if isinstance(told, int) else None),
        str(info.get("model_dtype", UNKNOWN)).split(" ")[0],
        _facts(info, ours),
        texts,
    )
    return HttpTarget(address, about, words, patience)


def _told(http: httpx.Client, path: str) -> dict[str, Any]:
    """Return the JSON object of a route; empty if it is not there."""
    try:
        answer = http.get(path)
        content = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _first_model(http: httpx.Client) -> str | None:
    data = _told(http, "/v1/models").get("data")
    first = data[0] if isinstance(data, list) and data else {}
    return str(first["id"]) if isinstance(first, dict) and "id" in first else None


def _answering(http: httpx.Client, url: str, names: Sequence[str], model: str) -> Api:
    """Return the first API that scores two items, or raise UsageError with the last answer."""
    said = ""
    for name in names:
        api = APIS[name]
        try:
            ask = TINY[0] if api.takes_ids else TINY[1]
            answer = http.post(api.path, content=api.encode(ask, model), headers=JSON)
            if answer.status_code == 200:
                api.read(answer.content, len(ask.items))
                return api
            said = f"{said}; {api.path} gets {answer.status_code}: {refusal(answer.content)}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"--url {url}: no answer: {error}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            said = f"{said}; {api.path} has no scores: {error!r}"
    raise UsageError(f"--url {url}: no API answers{said}")


JSON = {"Content-Type": "application/json"}


def refusal(body: bytes) -> str:
    """Return a server's own words for an error, on one line."""
    text = body.decode(errors="replace")
    try:
        content = msgspec.json.decode(body)
        content = content.get("error", content) if isinstance(content, dict) else content
        text = content.get("message", text) if isinstance(content, dict) else str(content)
    except msgspec.DecodeError:
        pass
    return " ".join(str(text).split())[:200]


def _words(http: httpx.Client, model: str) -> tuple[Sequence[str], str]:
    """Return words of one token each, and how the count was confirmed."""
    try:
        counts = _counts(http, model)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return WORDS, "one word for a token, not confirmed"
    words = [word for word, count in zip(WORDS, counts, strict=True) if count == 1]
    if len(words) < FEWEST_WORDS:
        return WORDS, "one word for a token, which the server's tokenizer divides"
    return words, "each word one token by the server's /tokenize"


def _counts(http: httpx.Client, model: str) -> list[int]:
    """Return the number of tokens of each of WORDS, by TEI's route or by vLLM's."""
    answer = http.post("/tokenize", json={"inputs": [*WORDS], "add_special_tokens": False})
    if answer.status_code == 200 and isinstance(texts := answer.json(), list):
        return [len(tokens) for tokens in texts]
    bodies = ({"model": model, "prompt": word, "add_special_tokens": False} for word in WORDS)
    return [int(http.post("/tokenize", json=body).json()["count"]) for body in bodies]


def _facts(info: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    facts = {name: info[name] for name in ("model_id", "model_dtype", "version") if info.get(name)}
    about = ("machine", "versions", "commit", "settings")
    return facts | {name: UNKNOWN if ours.get(name) is None else ours[name] for name in about}


@contextmanager
def started(model: str, options: str, patience: float) -> Iterator[str]:
    """Start `gpuscore serve MODEL OPTIONS`; yield its address, and end it.

    The server gives up a request no sooner than the client, unless OPTIONS say when.

    Raises:
        ConfigError: it does not start; with its own last words.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpuscore", "serve", model),
                *("--port", "0", "--no-log-requests", "--request-timeout", str(patience)),
                *shlex.split(options),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield _ready(process, errors, f"gpuscore serve {model} {options}".strip())
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _ready(process: "subprocess.Popen[str]", errors: Any, command: str) -> str:
    assert process.stdout is not None  # noqa: S101  (a pipe)
    for line in process.stdout:
        if "ready on " in line:
            return line.split("ready on ")[1].split(" ")[0].strip()
    process.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
    raise ConfigError(f"`{command}` did not start: {lines[-1].removeprefix('gpuscore: ')}")


class LocalTarget:
    """`Scorer` in this process."""

    words: Sequence[str] | None = None  # token ids are sent

    def __init__(self, about: About, scorer: Any) -> None:
        self.about, self._scorer = about, scorer
        self.on_gpu = _may_use_gpu(about)

    def send(
        self,
        api: Api,
        asks: Sequence[BenchRequest],
        clients: int = 1,
        offsets: Float64Array | None = None,
        labels: Ids = LABELS,
    ) -> Record:
        record = Record(len(asks))
        if offsets is not None or api.name != "score":
            record.due[:] = 0.0
            record.lost_because = "in process there are neither arrivals nor /v1/completions"
            return record

        def ask(number: int) -> None:
            record.due[number] = record.sent[number] = time.monotonic()
            try:
                scores = self._scorer.score(
                    asks[number].query, asks[number].items, label_token_ids=labels
                )
                record.status[number] = 200
                body: Any = {"scores": scores.scores.tolist()}
            except GpuscoreError as error:
                record.status[number] = 500
                body = {"error": {"message": error.message}}
            record.done[number] = time.monotonic()
            record.bodies[number] = msgspec.json.encode(body)

        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(ask, range(len(asks))))
        return record  # whose client_seconds stay 0: this process computes the model, too


@contextmanager
def in_process(name: str, config: ModelConfig) -> Iterator[LocalTarget]:
    """Load a model with `Scorer`; yield it, and close it."""
    from gpuscore.backends import plan_backend
    from gpuscore.models.hub import model_directory, model_name
    from gpuscore.offline.scorer import Scorer

    plan = plan_backend(model_directory(config.model, config.revision), config)
    served, vocab = model_name(config.model), plan.architecture.config.vocab_size
    facts = {"model_dtype": f"{plan.dtype_name} on {plan.device_name}", "machine": local_machine()}
    facts |= {"versions": versions(), "commit": commit() or UNKNOWN, "settings": changed(config)}
    with Scorer(replace(config, dtype=plan.dtype_name)) as scorer:
        scorer.warmup()
        yield LocalTarget(About(name, "score", served, vocab, plan.dtype_name, facts), scorer)


def api_key() -> str | None:
    """Return GPUSCORE_API_KEY, or None."""
    return os.environ.get(API_KEY_VARIABLE, "").strip() or None
