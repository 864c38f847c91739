"""Checks of the Prometheus configuration and rules by promtool, and by a real Prometheus that
scrapes a real server: every expression of the rules and the dashboard finds something."""

import json
import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import yaml

CALLER, SCRAPER = "a-caller's-key", "prometheus'-key"
# Values that Grafana substitutes for its variables.
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}
COMPARISON = re.compile(r"(.*)(?:==|>) ([\d.]+)\s*", re.DOTALL)
opener = build_opener(ProxyHandler({}))  # no proxy for loopback


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool(promtool, docker):
    directory = docker / "observability"
    run(promtool, "check", "config", "--syntax-only", directory / "prometheus.yml")
    rules = len(re.findall(r"- (?:alert|record):", (directory / "rules.yml").read_text()))
    assert rules > 0
    assert f"{rules} rules" in run(promtool, "check", "rules", directory / "rules.yml")
    run(promtool, "test", "rules", directory / "rules.test.yml")


def test_the_scrape_job_of_the_docs(promtool, docker, tmp_path):
    """The job in docs/how-to/monitor.md is valid.

    The one in kubernetes/README.md is not checked: Debian's Prometheus has no Kubernetes support.
    """
    text = (docker.parent / "docs" / "how-to" / "monitor.md").read_text()
    (job,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(job)
    run(promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml")


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.2)
    return result


@contextmanager
def process(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The address of a demo server that refuses requests while two are in flight."""
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"{CALLER}\n{SCRAPER}\n")
    flags = ["--port", "0", "--threads", "1", "--max-inflight-per-key", "2", "--no-log-requests"]
    command = [os.environ["GPUSCORE"], "serve", "demo", *flags, "--api-key-file", str(keys)]
    with process(*command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        ready = next((line for line in child.stdout if "ready on" in line), "")
        assert ready, "the server ended"
        yield ready.split("http://")[1].split(" ")[0]


def ask_for_scores(address: str) -> int:
    items = ["A wooden garden chair in blue.", "A red steel lamp."] * 50
    body = {"query": "query: a chair\nitem: ", "items": items, "labels": ["yes", "no"]}
    headers = {"Authorization": f"Bearer {CALLER}", "Content-Type": "application/json"}
    request = Request(f"http://{address}/v1/score", json.dumps(body).encode(), headers)
    try:
        with opener.open(request, timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def configuration(docker: Path, directory: Path, server: str) -> Path:
    """Write the shipped configuration with another address, key file and interval, and a second job
    that has a wrong key; return its path."""
    (directory / "rules.yml").write_text((docker / "observability/rules.yml").read_text())
    config = yaml.safe_load((docker / "observability/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gpuscore:8000"]}]
    job["static_configs"] = [{"targets": [server]}]
    for name, key in (("right", SCRAPER), ("wrong", "no-key")):
        (directory / name).write_text(key + "\n")
    job["authorization"]["credentials_file"] = str(directory / "right")
    wrong = {"authorization": {"credentials_file": str(directory / "wrong")}}
    config["scrape_configs"].append(job | wrong | {"job_name": "wrong-key"})
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def api(prometheus, promtool, docker, server, tmp_path_factory) -> Iterator[Callable[..., Any]]:
    """A function that asks a Prometheus which has scraped the working server.

    api(path, **parameters) returns the answer's data.
    """
    directory = tmp_path_factory.mktemp("prometheus")
    config = configuration(docker, directory, server)
    run(promtool, "check", "config", config)
    address = f"127.0.0.1:{free_port()}"
    with process(
        *(prometheus, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=error"),
    ):

        def get(path: str, **parameters: str) -> Any:
            url = f"http://{address}/api/v1/{path}?{urlencode(parameters)}"
            with opener.open(url, timeout=10) as answer:
                return json.load(answer)["data"]

        def scrapes() -> float:
            try:
                series = get("query", query='count_over_time(up{job="gpuscore"}[1h])')["result"]
            except OSError:
                return 0.0  # it does not listen yet
            return float(series[0]["value"][1]) if series else 0.0

        for _ in range(3):  # counts before the first scrape would not show as an increase
            before = scrapes()
            wait_for(lambda before=before: scrapes() >= before + 2)
            with ThreadPoolExecutor(8) as pool:
                statuses = set(pool.map(ask_for_scores, [server] * 8))
            assert statuses == {200, 429}
        before = scrapes()
        wait_for(lambda: scrapes() >= before + 3)
        yield get


def values(api: Callable[..., Any], expression: str) -> list[float]:
    """Return the numbers that an expression finds now."""
    result = api("query", query=expression)["result"]
    numbers = [float(sample["value"][1]) for sample in result]
    return [value for value in numbers if not math.isnan(value)]


def test_the_key_decides(api):
    targets = {target["labels"]["job"]: target for target in api("targets")["activeTargets"]}
    assert targets["gpuscore"]["health"] == "up"
    assert targets["wrong-key"]["health"] == "down"
    assert "401" in targets["wrong-key"]["lastError"]


def test_every_rule_finds_something(api):
    """Every rule finds values; an alert that does not fire has none, so its left side is asked."""
    groups = api("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    for rule in rules:
        expression = rule["query"]
        if rule["type"] == "alerting":
            match = COMPARISON.fullmatch(expression)
            assert match, f"{expression}: not of the form ... > number"
            expression = match[1]
        assert values(api, expression), expression
    assert max(values(api, "gpuscore:requests_429:ratio_rate5m")) > 0


def test_every_panel_finds_something(api, docker):
    dashboard = json.loads((docker / "observability/grafana/gpuscore.json").read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) > 40
    for expression in expressions:
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        assert values(api, expression), expression
    instances = api("label/instance/values", **{"match[]": "gpuscore_build_info"})
    assert len(instances) == 1
