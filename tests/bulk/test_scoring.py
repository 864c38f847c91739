"""Promise: a batch job keeps the engine full within bounds, sends again what the engine refuses or
loses, divides requests that fail, and ends when the engine has failed for good. Without labels,
rows go into the prompts of the model's family, or are scored for all of its classes; options that
do not fit the model are refused before rows are read."""

import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from gpuscore.errors import ConfigError, EngineFailed, NonfiniteScore, Unavailable
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily
from gpuscore.prompts.model import ModelPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.results import label_logprobs
from support.batch_jobs import check, encoder, fake_model, make_rows, read_jsonl, run, write_jsonl

ROWS = make_rows(300, queries=50)


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch):
    monkeypatch.setattr("gpuscore.commands.bulk.scoring.PAUSE", 0.01)


def scored(tmp_path, loading):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    _, bad_rows = run(source, output, loading)
    rows = read_jsonl(output)
    path = tmp_path / "out.jsonl.bad.jsonl"
    bad = {row["line"] - 1 for row in read_jsonl(path)} if bad_rows else set()
    good = [row for row in ROWS if row["id"] not in bad]
    assert [row["id"] for row in rows] == [row["id"] for row in good], "once each, in order"
    check(good, [row["scores"] for row in rows])
    return bad


class Troubled:
    """An engine that asks `trouble` about each request before it takes it."""

    def __init__(self, engine, trouble):
        self._engine, self._trouble = engine, trouble
        self.limits, self.sent, self.flying, self.most = engine.limits, 0, 0, 0
        self.largest = 0  # tokens of a request
        self._lock = threading.Lock()
        self.away = iter(())  # for each question whether it is alive

    @property
    def alive(self):
        return not next(self.away, False)

    def score_all(self, requests):
        return [self._one(request) for request in requests]

    def _one(self, request):
        self.sent += 1
        error = self._trouble(self.sent, request)
        if error is not None:
            return error
        (future,) = self._engine.score_all([request])
        with self._lock:
            self.flying += request.num_tokens
            self.most = max(self.most, self.flying)
            self.largest = max(self.largest, request.num_tokens)
        future.add_done_callback(lambda _: self._landed(request))
        return future

    def _landed(self, request):
        with self._lock:
            self.flying -= request.num_tokens


def troubled(trouble, made=None, **words):
    def around(engine):
        troubled = Troubled(engine, trouble)
        if made is not None:
            made.append(troubled)
        return troubled

    return lambda: fake_model(around, **words)


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


def test_lost_requests_are_sent_again(tmp_path):
    seen = []

    def lose(number, request):
        """Lose every request once."""
        first = all(request is not earlier for earlier in seen)
        seen.append(request)
        return failed(Unavailable("the engine stopped")) if first else None

    assert not scored(tmp_path, troubled(lose))
    assert len(seen) > 2


def test_an_engine_that_is_away_for_a_while(tmp_path):
    def around(engine):
        troubled = Troubled(engine, lambda number, request: None)
        troubled.away = iter([False, True, True, True, True, True])
        return troubled

    assert not scored(tmp_path, lambda: fake_model(around))


def test_a_row_that_fails_leaves_the_others_of_its_request(tmp_path):
    """The engine's error does not say which item it is about."""
    poison = [ROWS[7], ROWS[8], ROWS[250]]
    marks = set()

    def fail(number, request):
        whole = {(*request.query_ids.tolist(), *ids.tolist()) for ids in request.item_ids}
        return failed(NonfiniteScore("not finite")) if whole & marks else None

    for ids in encoder().prompts(row["query"] + row["item"] for row in poison):
        marks.add(tuple(ids.tolist()))
    bad = scored(tmp_path, troubled(fail))
    assert bad >= {7, 8, 250}
    same = {
        row["id"]
        for row in ROWS
        for poisoned in poison
        if (row["query"], row["item"]) == (poisoned["query"], poisoned["item"])
    }
    assert bad == same


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_engines_are_full_and_no_more(tmp_path, replicas):
    made = []
    words = {"max_tokens": 64, "batch_us": 20000, "replicas": replicas}
    scored(tmp_path, troubled(lambda number, request: None, made, **words))
    assert 64 * 6 * replicas < made[0].most < 64 * 8 * replicas + made[0].largest


def test_an_engine_that_failed_for_good_ends_the_job_and_keeps_its_state(tmp_path):
    lost = threading.Event()

    def lose(number, request):
        if number > 10:
            lost.set()
            return failed(Unavailable("the engine is not running"))
        return None

    def wait_ended():
        lost.wait(30)
        raise EngineFailed("five times in a row")

    with pytest.raises(EngineFailed, match="five times"):
        scored(tmp_path, troubled(lose, wait_ended=wait_ended))
    assert not (tmp_path / "out.jsonl").exists()
    assert not scored(tmp_path, fake_model)


def test_a_bug_is_not_hidden(tmp_path):
    def fail(number, request):
        return failed(RuntimeError("a bug"))

    with pytest.raises(RuntimeError, match="a bug"):
        scored(tmp_path, troubled(fail))


def test_a_row_that_ends_every_engine_is_bad_and_the_others_are_scored(tmp_path):
    """Requests that lose an engine are sent again, then divided until the row is alone."""
    deadly = encoder().plain_ids(ROWS[17]["query"] + ROWS[17]["item"]).tolist()
    assert (
        sum(row["query"] + row["item"] == ROWS[17]["query"] + ROWS[17]["item"] for row in ROWS) == 1
    )
    losses = []

    def lose(number, request):
        query = request.query_ids.tolist()
        if all(query + item.tolist() != deadly for item in request.item_ids):
            return None
        losses.append(len(request.item_ids))
        return failed(Unavailable("the engine stopped", retry_after=1))

    assert scored(tmp_path, troubled(lose)) == {ROWS[17]["id"]}
    assert losses[-3:] == [1, 1, 1]
    (bad,) = read_jsonl(tmp_path / "out.jsonl.bad.jsonl")
    assert bad["reason"] == "internal_error: the engine ended 3 times while it had this row"


def test_what_was_in_flight_beside_a_deadly_row_is_not_blamed(tmp_path):
    """An engine's end loses all that it has; what was lost twice is sent alone."""
    deadly = encoder().plain_ids(ROWS[17]["query"] + ROWS[17]["item"]).tolist()

    def around(engine):
        score_all, lock, flying = engine.score_all, threading.Lock(), []

        def ends(request):
            query = request.query_ids.tolist()
            return any(query + item.tolist() == deadly for item in request.item_ids)

        def answer(request, future):
            time.sleep(0.02)  # others are sent meanwhile
            with lock:
                lost = list(flying) if ends(request) else []
                flying[:] = [one for one in flying if one not in (*lost, future)]
            if lost:
                for one in lost:
                    one.set_exception(Unavailable("the engine stopped"))
            elif not future.done():
                future.set_result(score_all([request])[0].result())

        def sent(requests):
            futures = [Future() for _ in requests]
            with lock:
                flying.extend(futures)
            for request, future in zip(requests, futures, strict=True):
                threading.Thread(target=answer, args=(request, future)).start()
            return futures

        engine.score_all = sent
        return engine

    assert scored(tmp_path, lambda: fake_model(around)) == {ROWS[17]["id"]}


RANKER = PromptFamily(
    name="ranker",
    source="tests",
    parts=("{instruction} {query} item: ", "{document}"),
    labels=("yes", "no"),
    instruction="judge",
)
GUARD = PromptFamily(
    name="guard",
    source="tests",
    parts=("text: ", "{document}"),
    labels=("yes", "no"),
    classes=("safe", "unsafe"),
)
PAIRS = make_rows(60, queries=9)


def model_of(family):
    @contextmanager
    def loading():
        with fake_model() as model:
            builder = model.prompts.builder
            yield replace(model, prompts=ModelPrompts(builder, FamilyPrompts(family, builder)))

    return loading


def alone(family, rows):
    """Return each row's result from a request of its own."""
    with model_of(family)() as model:
        for row in rows:
            query = row["query"] if family.ranks else None
            built = model.prompts.family.build(RerankInput(query, [row["item"]]))
            (future,) = model.engine.score_all([built.request])
            yield model.prompts.family, future.result()


def test_rerankers_give_relevances(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", PAIRS)
    run(source, tmp_path / "out.jsonl", model_of(RANKER), labels=None)
    scores = [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")]
    expected = [
        prompts.family.relevance(prompts.raw_scores(result)).tolist()
        for prompts, result in alone(RANKER, PAIRS)
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-9)


def test_guards_give_the_probability_of_each_class(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", PAIRS)
    run(source, tmp_path / "out.jsonl", model_of(GUARD), labels=None, query_column=None)
    shares = [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")]
    raw = np.concatenate([prompts.raw_scores(result) for prompts, result in alone(GUARD, PAIRS)])
    np.testing.assert_allclose(np.array(shares)[:, 0], 1 / (1 + np.exp(-raw)), rtol=1e-9)
    np.testing.assert_allclose(np.sum(shares, axis=1), 1)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (RANKER, {"query_column": None}, "--query-column is missing: prompts of ranker"),
        (GUARD, {}, "--query-column: guard judges single texts"),
    ],
)
def test_options_that_do_not_fit_the_family(tmp_path, family, options, message):
    source = write_jsonl(tmp_path / "in.jsonl", [b"{bad"])
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "out.jsonl", model_of(family), labels=None, **options)


@pytest.mark.parametrize("full", [False, True])
def test_labels_of_several_tokens(tmp_path, full):
    labels = ("yes", "yes and no", "no")
    source = write_jsonl(tmp_path / "in.jsonl", PAIRS)
    run(source, tmp_path / "out.jsonl", labels=",".join(labels), apply_softmax=not full)
    scores = [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")]
    expected = []
    with fake_model() as model:
        for row in PAIRS:
            score_input = ScoreInput(row["query"], [row["item"]], labels=labels)
            (future,) = model.engine.score_all([model.prompts.builder.build(score_input)])
            (logprobs,) = label_logprobs(future.result())
            shares = np.exp(logprobs)
            expected.append(shares if full else shares / shares.sum())
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
