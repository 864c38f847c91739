"""Promise: `--metrics-port` gives the metrics to scrapers without a key, and nothing else;
routers find the names that they read."""

import socket
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuscore.errors import ConfigError
from gpuscore.server.http.address import metrics_address
from gpuscore.server.metrics_port import CONNECTIONS
from gpuscore.server.observe.engine_metrics import vllm_metrics
from gpuscore.types.stats import NO_STATS, ReplicaState
from support.connections import free_port, post
from support.programs import run
from support.serving import wait_until
from support.tape_engine import HELD
from support.tape_servers import body_of, in_flight, let_go, tape_server

KEY = {"GPUSCORE_API_KEY": "s3cret"}


def samples(text):
    return {
        (sample.name, sample.labels.get("model_name", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def scraped():
    port = free_port()
    settings = {"metrics_port": str(port)}
    with tape_server(server=settings, environment=KEY) as (_, client):
        client.headers["Authorization"] = "Bearer s3cret"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as scraper:
            yield client, scraper


def test_metrics_need_no_key_there_and_nothing_else_is_there(scraped):
    client, scraper = scraped
    assert httpx.get(f"{client.base_url}/metrics").status_code == 401
    answer = scraper.get("/metrics")
    assert answer.status_code == 200
    assert "gpuscore_requests_total" in answer.text
    openmetrics = scraper.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")
    assert scraper.get("/metrics", headers={"host": "evil.example"}).status_code == 400
    for path in ("/", "/v1/models", "/info", "/health", "/docs", "/openapi.json"):
        assert scraper.get(path).status_code == 404
    assert scraper.post("/v1/score", content=body_of(1, 2)).status_code == 404
    assert scraper.post("/metrics").status_code == 405


def test_running_and_waiting_requests_have_vllms_names(scraped):
    client, scraper = scraped

    def vllm():
        values = samples(scraper.get("/metrics").text)
        return {name[5:]: value for (name, _), value in values.items() if name.startswith("vllm:")}

    post(client, body_of(1, 2, 3))
    wait_until(lambda: vllm()["gpu_prefix_cache_queries_total"] == 3)
    names = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    assert vllm().keys() == names | {
        "gpu_cache_usage_perc",
        "gpu_prefix_cache_queries_total",
        "gpu_prefix_cache_hits_total",
    }
    with in_flight(client, HELD) as held, in_flight(client, 1, 2, 3):
        wait_until(lambda: vllm()["num_requests_running"] == 1)
        wait_until(lambda: vllm()["num_requests_waiting"] == 1)
        assert let_go(held).status == 200
    wait_until(lambda: vllm()["num_requests_running"] + vllm()["num_requests_waiting"] == 0)


def test_connections_there_do_not_take_the_servers(scraped):
    client, scraper = scraped
    scraper.close()
    idle = [
        socket.create_connection((scraper.base_url.host, scraper.base_url.port))
        for _ in range(CONNECTIONS + 5)
    ]
    try:
        wait_until(lambda: any(closed(connection) for connection in idle))
        assert post(client, body_of(1, 2)).status_code == 200
    finally:
        for connection in idle:
            connection.close()


def closed(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_an_address_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "demo", "--device", "cpu", "--port", "0", "--metrics-port", port)
    assert done.returncode == 78
    refusal = f"cannot bind --metrics-port {port}: Address already in use"
    assert refusal in done.stderr


@pytest.mark.parametrize(
    ("wanted", "address"),
    [("9", ("127.0.0.1", 9)), ("0.0.0.0:9", ("0.0.0.0", 9)), ("[::1]:9", ("::1", 9))],
)
def test_a_port_may_have_an_address(wanted, address):
    assert metrics_address(wanted) == address
    with pytest.raises(ConfigError, match="must be PORT or ADDRESS:PORT"):
        metrics_address(f"{wanted}x")


def test_a_model_has_one_series_over_its_replicas():
    """Routers read the first series of a name."""
    stats = replace(NO_STATS, requests=5, running=2, pages_used=1, pages_free=3)
    replicas = [
        ReplicaState("0", "cpu", True, stats, model="a"),
        ReplicaState("1", "cpu", True, stats, model="a"),
        ReplicaState("2", "cpu", False, stats, model="a"),
        ReplicaState("0", "cpu", True, NO_STATS, model="b"),
    ]
    values = {
        (sample.name, sample.labels["model_name"]): sample.value
        for family in vllm_metrics(replicas)
        for sample in family.samples
    }
    assert values["vllm:num_requests_running", "a"] == 4
    assert values["vllm:num_requests_waiting", "a"] == 6
    assert (
        values["vllm:kv_cache_usage_perc", "a"] == values["vllm:gpu_cache_usage_perc", "a"] == 0.25
    )
    assert values["vllm:num_requests_waiting", "b"] == 0
    assert len(values) == 12
