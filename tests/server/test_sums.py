"""Promise: metrics of several processes add up, and what a process counted is kept when it ends."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuscore.processes.fronts.board import LATE, Totals
from gpuscore.processes.fronts.messages import Counted, decode_from_front
from gpuscore.processes.worker.frames import encode
from gpuscore.server.observe.metrics import Metrics, ServerState
from gpuscore.server.observe.sums import Snapshot, add
from gpuscore.types.record import RequestRecord


def metrics(running=0, others=None):
    state = ServerState(True, True, running, 2, 3, [])
    return Metrics(lambda: state, others)


def finish(own, route="/v1/score", seconds=0.2, items=4):
    record = RequestRecord("id", method="POST", route=route, status=200, items=items)
    record.seconds = seconds
    own.finished(record)


def samples(own):
    text = own.exposition("")[0].decode()
    return {
        (sample.name, *sorted(sample.labels.items() - {("model", "")})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_sums_of_three_processes():
    """Two of them know routes that the first has never seen."""
    others = [metrics(running=2), metrics(running=5)]
    finish(others[0], "/rerank", 0.004)
    for other in others:
        finish(other, "/v1/score", 3.0)
    sums = {}
    for other in others:
        snapshot = other.snapshot()
        add(sums, snapshot.growing)
        add(sums, snapshot.present)
    asked = []
    first = metrics(running=1, others=lambda own: asked.append(own) or sums)
    finish(first, "/v1/score", 0.2)
    values = samples(first)
    assert values["gpuscore_requests_running",] == 8
    assert values["gpuscore_log_lines_dropped_total",] == 6
    assert values["gpuscore_items_total",] == 16
    ok = (("code", ""), ("method", "POST"))
    for route, count in (("/v1/score", 3), ("/rerank", 1)):
        key = ("gpuscore_requests_total", *ok, ("route", route), ("status", "200"))
        assert values[key] == count
    for bound, count in (("0.1", 0), ("0.25", 1), ("2.5", 1), ("5.0", 3), ("+Inf", 3)):
        key = ("gpuscore_request_duration_seconds_bucket", ("le", bound), ("route", "/v1/score"))
        assert values[key] == count
    assert values["gpuscore_request_duration_seconds_sum", ("route", "/v1/score")] == pytest.approx(
        6.2
    )
    assert values["gpuscore_up",] == 1, "of the server"
    made = values["gpuscore_items_created",]
    assert made == min(value for key, value in sums.items() if key[1] == "gpuscore_items_created")
    assert len(asked) == 1, "once for a scrape"
    assert asked[0].present == {("gpuscore_requests_running",) * 2 + ((),): 1}


def test_openmetrics_of_sums_is_valid():
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

    other = metrics()
    finish(other, "/rerank")
    finish(other)
    first = metrics(others=lambda own: other.snapshot().growing)
    finish(first)
    text = first.exposition("application/openmetrics-text")[0].decode()
    assert "gpuscore_requests" in {family.name for family in parse(text)}


def test_a_message_brings_a_snapshot():
    own = metrics(running=3)
    finish(own)
    message = decode_from_front(encode(Counted(own.snapshot(), 7)))
    assert isinstance(message, Counted)
    assert (message.number, message.counts) == (7, own.snapshot())


def snapshot(growing, present=0.0):
    return Snapshot({("f", "f_total", ()): growing}, {("g", "g", ()): present})


def answer(totals):
    ((_, _, summed),) = totals.answers()
    return summed.get(("f", "f_total", ())), summed.get(("g", "g", ()))


class TestTotals:
    def test_an_answer_waits_for_the_others_but_not_long(self):
        totals = Totals()
        for front in range(3):
            totals.report(front, snapshot(10**front, 1.0))
        number = totals.ask(0, 5, [1, 2])
        totals.report(1, snapshot(20), number)
        assert not totals.answers()
        totals.report(2, snapshot(200), number)
        assert totals.answers() == [
            (0, 5, {("f", "f_total", ()): 220, ("g", "g", ()): 0.0}),
        ]
        totals.ask(0, 6, [1])
        totals._questions[number + 1].until -= LATE
        assert answer(totals) == (220, 0.0), "the last report of one that is late"

    def test_a_reply_to_another_question_is_no_answer(self):
        totals = Totals()
        first, second = totals.ask(0, 1, [1]), totals.ask(2, 1, [1])
        totals.report(1, snapshot(1), first)
        assert [asker for asker, _, _ in totals.answers()] == [0]
        totals.report(1, snapshot(2), second)
        assert answer(totals) == (2, 0.0)

    def test_counters_of_a_lost_front_stay_and_its_gauges_go(self):
        totals = Totals()
        totals.report(0, snapshot(1))
        totals.report(1, snapshot(10, 4.0))
        totals.ask(0, 1, [1])
        totals.ask(1, 1, [0])
        totals.lost(1)
        assert answer(totals) == (10, None)
        totals.report(1, snapshot(3, 2.0))
        totals.ask(0, 2, [])
        assert answer(totals) == (13, 2.0), "its replacement's are added"
