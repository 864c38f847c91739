"""Promise: the numbers of /metrics add up, whatever fails, and no counter ever decreases."""

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gpuscore.dialects.served import ServedModel
from gpuscore.processes.worker.child import BEAT as HEARTBEAT
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService
from gpuscore.types.record import STAGES
from support.connections import check_error, post, score
from support.error_table import covers
from support.pages import ROOT
from support.serving import wait_until
from support.stub_service import STATS, ask, loaded, stub_service
from support.tape_engine import HELD, NO_MEMORY, NO_NUMBER
from support.tape_servers import body_of, engine_of, in_flight, let_go, tape_server
from support.watched_server import samples_of

# The names that an operator's rules may rely on, with their types.
NAMES = {
    "requests": "counter",
    "request_duration_seconds": "histogram",
    "queue_duration_seconds": "histogram",
    "requests_running": "gauge",
    "requests_waiting": "gauge",
    "tokens_waiting": "gauge",
    "items": "counter",
    "prompt_tokens": "counter",
    "cached_tokens": "counter",
    "batch_tokens": "summary",
    "batch_items": "summary",
    "kv_pages": "gauge",
    "kv_usage_ratio": "gauge",
    "evictions": "counter",
    "rejected": "counter",
    "cancelled": "counter",
    "oom": "counter",
    "nonfinite_scores": "counter",
    "engine_restarts": "counter",
    "engine_heartbeat_age_seconds": "gauge",
    "event_loop_lag_seconds": "histogram",
    "build": "info",
}
ONLY_GROW = ("counter", "histogram", "summary")


def totals(client):
    """Return {counter's name, with the first label's value if it has labels: value}."""
    return {
        name.removeprefix("gpuscore_") + "".join(f" {value}" for _, value in labels): amount
        for (name, labels), amount in samples_of(client, ["counter"]).items()
        if name.endswith("_total")
    }


def settled(client, read):
    """Return `read()` once every answer is counted: two of the engine's reports later."""
    beats = []
    while len(beats) < 4:
        age = samples_of(client)["gpuscore_engine_heartbeat_age_seconds", ()]
        beat = time.monotonic() - age
        if not beats or beat > beats[-1] + HEARTBEAT / 2:
            beats.append(beat)
        time.sleep(0.02)
    return read()


def post_tape(client, *tokens):
    return post(client, body_of(*tokens))


def code_of(reply):
    return reply.json()["error"]["code"]


@pytest.fixture(scope="module")
def tape():
    patience = {"delay": 0.3, "forgiven": 0, "silent": 1.0, "stopped": 4.0}
    with tape_server(patience, engine={"max_queued_requests": 2}, engines=4) as started:
        yield started


class TestFailures:
    """Counters of a real server whose engine fails in every way."""

    @covers("insufficient_memory")
    def test_what_the_engine_counts(self, tape):
        _, client = tape
        wait_until(lambda: client.get("/ready").status_code == 200)
        before = settled(client, lambda: totals(client))
        assert code_of(post_tape(client, NO_NUMBER)) == "nonfinite_score"
        check_error(post_tape(client, NO_MEMORY), 503, "insufficient_memory")
        crowd = {"items": [[1] * 30, [NO_MEMORY]], "label_token_ids": [3]}
        assert code_of(score(client, **crowd)) == "insufficient_memory"
        for query in range(20):  # 4,000 tokens each; 65,536 fit
            body = {"query": [query] * 4000, "items": [[1]], "label_token_ids": [3]}
            assert score(client, **body).status_code == 200
        after = settled(client, lambda: totals(client))
        grown = {name: after[name] - before.get(name, 0) for name in after}
        assert grown["nonfinite_scores_total"] == 2, "the item is computed twice"
        assert grown["oom_total failed"] == 2
        assert grown["oom_total retried"] >= 1
        assert grown["evictions_total"] >= 20 * 250 - 4096
        assert not any(value for name, value in grown.items() if name.startswith("rejected"))

    def test_rejections_are_the_codes_of_the_answers(self, tape):
        """Each request that the engine did not take counts under its error code, and no other
        request does."""
        server, client = tape
        wait_until(lambda: client.get("/ready").status_code == 200)
        before = totals(client)
        replies = [post(client, content) for content in (b"{", b'{"zzz":1}', b'{"items":[[1]]}')]
        replies.append(post(client, body_of(1), content_type="text/plain"))
        replies.append(client.post("/rerank", json={"query": 1}))
        replies.append(score(client, items=[[1]], label_token_ids=[3], model="other"))
        replies += [score(client, items=[[5000]], label_token_ids=[3]) for _ in range(2)]
        replies.append(score(client, items=[[1] * 5000], label_token_ids=[3]))
        with in_flight(client, HELD) as held, in_flight(client, 1) as second:
            replies.append(post_tape(client, 1))
            # Answered, not given up: the queue is full until the engine has heard of that.
            assert (let_go(held).status, second.reply().status) == (200, 200)
        with in_flight(client, HELD) as lost:
            os.kill(engine_of(server), signal.SIGKILL)
            assert lost.reply().status == 503  # the engine had taken it
            wait_until(lambda: client.get("/health").status_code == 503)
            replies.append(post_tape(client, 1))
        assert all(reply.status_code >= 400 for reply in replies)
        codes = Counter(map(code_of, replies))
        assert len(codes) == 8, codes
        wait_until(lambda: client.get("/ready").status_code == 200)
        after = totals(client)
        rejected = {
            name.split()[1]: after[name] - before.get(name, 0)
            for name in after
            if name.startswith("rejected_total")
        }
        assert {code: count for code, count in rejected.items() if count} == codes

    def test_counters_do_not_fall_when_the_engine_is_replaced(self, tape):
        server, client = tape
        wait_until(lambda: client.get("/ready").status_code == 200)
        post_tape(client, 1, 2)
        first = before = settled(client, lambda: samples_of(client, ONLY_GROW))
        os.kill(engine_of(server), signal.SIGKILL)
        dead = False
        while True:
            ready = client.get("/ready").status_code == 200
            now = samples_of(client, ONLY_GROW)
            assert {key for key in before if now.get(key, -1) < before[key]} == set()
            before, dead = now, dead or not ready
            if dead and ready:
                break
        for _ in range(3):
            assert post_tape(client, 1, 2).status_code == 200
        after = settled(client, lambda: samples_of(client, ONLY_GROW))
        for name, growth in (
            ("batches_total", 3),
            ("batch_tokens_count", 3),
            ("batch_tokens_sum", 6),
            ("computed_tokens_total", 6),
            ("engine_restarts_total", 1),
        ):
            key = (f"gpuscore_{name}", ())
            assert after[key] == first[key] + growth

    def test_the_age_of_the_last_sign_of_life(self, tape):
        server, client = tape
        wait_until(lambda: client.get("/ready").status_code == 200)

        def age():
            return samples_of(client)["gpuscore_engine_heartbeat_age_seconds", ()]

        wait_until(lambda: age() < 2 * HEARTBEAT)
        os.kill(engine_of(server), signal.SIGSTOP)
        wait_until(lambda: age() > 4 * HEARTBEAT)
        os.kill(engine_of(server), signal.SIGCONT)
        wait_until(lambda: age() < 2 * HEARTBEAT)


def test_a_blocked_event_loop_shows():
    operations = Operations(stub_service())

    async def block():
        watching = asyncio.create_task(operations.watch_loop())
        await asyncio.sleep(0.05)
        time.sleep(0.4)
        await asyncio.sleep(0.25)
        watching.cancel()

    start = time.monotonic()
    asyncio.run(block())
    took = time.monotonic() - start
    text = operations.metrics.exposition("")[0].decode()
    (late,) = [
        line
        for line in text.splitlines()
        if line.startswith("gpuscore_event_loop_lag_sec") and "_sum" in line
    ]
    assert 0.3 <= float(late.split()[1]) <= took - 0.2, "the sleep itself does not count as delay"


class TestMetrics:
    def test_names_types_and_help(self, watched):
        families = {
            family.name: family
            for family in text_string_to_metric_families(watched.client.get("/metrics").text)
        }
        for name, kind in NAMES.items():
            family = families.get(f"gpuscore_{name}") or families[f"gpuscore_{name}_info"]
            assert family.type == kind or (kind, family.type) == ("info", "gauge")
            assert len(family.documentation) > 5
        for name, family in families.items():
            assert name.startswith("gpuscore_")
            assert not name.removesuffix("_total").endswith(("_ms", "_seconds_seconds"))
            assert not family.documentation[0].islower()

    def test_every_bucket_is_on_the_dashboard(self, watched):
        score(watched.client)  # the durations have buckets only once there was a request
        watched.client.get("/ready")
        settled(watched.client, watched.samples)
        text = watched.client.get("/metrics").text
        dashboard = (ROOT / "docker/observability/grafana/gpuscore.json").read_text()
        buckets = {line.split("{")[0] for line in text.splitlines() if "_bucket{" in line}
        assert buckets == set(re.findall(r"\w+_bucket", dashboard))
        assert 'request_duration_seconds_count{model="",route="/ready"}' not in text
        assert "_created" not in text

    def test_counters_add_up(self, watched):
        sizes = [(1, 9), (4, 7), (30, 2)]
        before = settled(watched.client, watched.samples)
        read = sent = 0
        for items, query in sizes:
            prompts = [[6 + item] for item in range(items)]
            body = {"query": [5] * query, "items": prompts, "label_token_ids": [3]}
            content = json.dumps(body).encode()
            read, sent = read + len(content), sent + len(post(watched.client, content).content)
        for content in (b"{", b'{"zzz":1}'):
            read, sent = read + len(content), sent + len(post(watched.client, content).content)
        after = settled(watched.client, watched.samples)

        def grown(name, **labels):
            key = (f"gpuscore_{name}", tuple(sorted(labels.items())))
            return after[key] - before.get(key, 0)

        ok = {"route": "/v1/score", "method": "POST", "status": "200", "code": ""}
        bad = ok | {"status": "400", "code": "invalid_request"}
        tokens = sum(items * (query + 1) for items, query in sizes)
        assert grown("requests_total", **ok) == len(sizes)
        assert grown("requests_total", **bad) == 2
        assert grown("request_duration_seconds_count", route="/v1/score") == len(sizes) + 2
        assert grown("items_total") == grown("request_items_sum") == 35
        assert grown("prompt_tokens_total") == tokens
        assert grown("computed_tokens_total") == tokens - grown("cached_tokens_total")
        assert grown("batches_total") >= len(sizes)
        assert grown("batch_tokens_count") == grown("batch_items_count") == grown("batches_total")
        assert grown("batch_tokens_sum") == grown("computed_tokens_total")
        assert grown("batch_items_sum") == 35
        assert grown("request_body_bytes_sum") == read
        assert grown("response_body_bytes_sum") == sent
        for stage in STAGES:
            assert grown(f"{stage}_duration_seconds_count") == len(sizes)
            assert 0 <= grown(f"{stage}_duration_seconds_sum") < 20
            assert grown(f"{stage}_duration_seconds_bucket", le="+Inf") == len(sizes)
        assert after["gpuscore_requests_running", ()] == 1, "the scrape itself"
        assert after["gpuscore_requests_waiting", ()] == after["gpuscore_tokens_waiting", ()] == 0
        assert after["gpuscore_up", ()] == after["gpuscore_ready", ()] == 1
        assert after["gpuscore_log_lines_dropped_total", ()] == 0

    def test_the_engine_is_asked_when_somebody_scrapes(self):
        (reply,) = ask(stub_service(), {"method": "GET", "url": "/metrics"})
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
            if "state" not in sample.labels
        }
        assert values["gpuscore_requests_waiting"] == STATS.requests
        assert values["gpuscore_tokens_waiting"] == STATS.tokens
        assert values["gpuscore_kv_usage_ratio"] == 0.1
        done = STATS.counters
        assert values["gpuscore_batches_total"] == done.batches
        assert values["gpuscore_computed_tokens_total"] == done.computed_tokens
        assert values["gpuscore_prefix_cache_tokens_total"] == done.cached_tokens
        assert values["gpuscore_evictions_total"] == done.evicted_pages
        assert values["gpuscore_nonfinite_scores_total"] == done.nonfinite_rows
        assert values["gpuscore_engine_restarts_total"] == STATS.restarts
        assert values["gpuscore_engine_heartbeat_age_seconds"] == STATS.heartbeat_age
        assert values["gpuscore_tokens_per_second"] == STATS.tokens_per_second
        assert values["gpuscore_capacity_tokens_per_second"] == STATS.capacity
        for state in ("free", "cached", "used"):
            count = getattr(STATS, f"pages_{state}")
            assert (
                f'gpuscore_kv_pages{{model="tiny",replica="0",state="{state}"}} {count}.0'
                in reply.text
            )
        assert 'gpuscore_oom_total{model="tiny",outcome="retried",replica="0"} 4.0' in reply.text
        assert 'gpuscore_oom_total{model="tiny",outcome="failed",replica="0"} 2.0' in reply.text
        for name, total in (("tokens", 7000), ("items", 2)):
            assert f'gpuscore_batch_{name}_count{{model="tiny",replica="0"}} 6.0' in reply.text
            assert f'gpuscore_batch_{name}_sum{{model="tiny",replica="0"}} {total}.0' in reply.text

    def test_before_the_model_is_there_and_after_its_engine_has_died(self):
        dead = stub_service()
        loaded(dead).engine.close()
        for service, up in ((ScoringService([ServedModel("m")]), 1), (dead, 0)):
            (reply,) = ask(service, {"method": "GET", "url": "/metrics"})
            assert reply.status_code == 200
            assert f"gpuscore_up {up}.0" in reply.text
            assert "gpuscore_ready 0.0" in reply.text
            assert "gpuscore_build_info{version=" in reply.text
            assert "gpuscore_kv_pages" not in reply.text
            counted = 'gpuscore_batches_total{model="tiny",replica="0"} 6.0' in reply.text
            heard = "gpuscore_engine_heartbeat_age_seconds" in reply.text
            assert counted == heard == (service is dead)

    def test_openmetrics(self, watched):
        reply = watched.client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(reply.text)}
        assert {"gpuscore_requests", "gpuscore_queue_duration_seconds"} <= names
        assert all(name.startswith("gpuscore_") for name in names)
