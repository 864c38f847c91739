"""Promise: docker/'s files agree with each other and with the server that they start.

`make manifests-test` checks that Kubernetes, Compose, Prometheus and Grafana accept them.
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from gpuscore.commands.cli import make_parser
from gpuscore.config import EngineConfig, ModelConfig, ServerConfig
from gpuscore.config.sources import read_settings
from gpuscore.dialects.paths import OPEN_PATHS
from gpuscore.dialects.served import ServedModel
from gpuscore.processes.worker.process import END_SECONDS
from gpuscore.server.observe.engine_metrics import engine_metrics
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService
from gpuscore.server.stopping import LAST_ANSWERS, LAST_READS
from gpuscore.types.stats import NO_STATS, ReplicaState

DOCKER = Path(__file__).parents[2] / "docker"
KUBERNETES, OBSERVABILITY = DOCKER / "kubernetes", DOCKER / "observability"
MACHINES = {
    **dict.fromkeys(("h100", "l4", "rtx-pro-6000"), "nvidia.com/gpu"),
    **dict.fromkeys(("tpu-v5e", "tpu-v6e"), "google.com/tpu"),
}
# The last look, the last answers; the engine's process ends a little later.
AFTER_THE_DRAIN = LAST_READS + LAST_ANSWERS + 2 * END_SECONDS
SPARE = 10.0  # seconds of a stop after the drain, of which half are planned for
assert AFTER_THE_DRAIN <= SPARE / 2
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
    "gauge": ("",),
    "info": ("_info",),
}


def load(path):
    return yaml.safe_load(path.read_text())


def load_all(path):
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture(scope="module")
def deployment():
    return load(KUBERNETES / "base/deployment.yaml")["spec"]


@pytest.fixture(scope="module")
def pod(deployment):
    return deployment["template"]["spec"]


@pytest.fixture(scope="module")
def server(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture(scope="module")
def compose():
    return load(DOCKER / "compose.yaml")


def settings_of(arguments, config=None):
    """Return the server's settings for its command line, with `config` as its configuration
    file."""
    known = {"/models/$(MODEL)": "demo", "${MODEL:-demo}": "demo"}
    parsed = [known.get(argument, argument) for argument in arguments]
    parsed = [re.sub(r"^--config=.*", f"--config={config}", argument) for argument in parsed]
    return read_settings(vars(make_parser().parse_args(parsed)), {})


@pytest.fixture(scope="module")
def config(server):
    return settings_of(server["args"], KUBERNETES / "l4/gpuscore.toml").make(ServerConfig)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_command_line_and_the_file_are_the_servers_own(server, machine):
    path = KUBERNETES / machine / "gpuscore.toml"
    settings = settings_of(server["args"], path)
    config = settings.make(ServerConfig)
    assert config.host == "0.0.0.0"
    assert settings.make(ModelConfig).model == "$(MODEL)=/models/$(MODEL)"
    for name, value in tomllib.loads(path.read_text()).items():
        assert settings.chosen[name].value == value, "the command line takes nothing back"


def test_ports_and_probes(server, config):
    (port,) = server["ports"]
    assert port == {"name": "http", "containerPort": config.port}
    (exposed,) = load(KUBERNETES / "base/service.yaml")["spec"]["ports"]
    assert (exposed["port"], exposed["targetPort"]) == (config.port, "http")
    paths = {"startupProbe": "/livez", "readinessProbe": "/ready", "livenessProbe": "/livez"}
    for probe, path in paths.items():
        assert server[probe]["httpGet"] == {"path": path, "port": "http"}
        assert path in OPEN_PATHS, "the kubelet has no key"


def seconds(probe):
    return probe["periodSeconds"] * probe["failureThreshold"]


def test_a_stop_fits_its_grace_period(deployment, pod, server, config):
    leaving = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert leaving > seconds(server["readinessProbe"])
    assert config.drain_seconds > config.request_timeout, "nothing that is in time is cut off"
    assert leaving + config.drain_seconds + SPARE == pod["terminationGracePeriodSeconds"]


def test_a_start_and_an_engines_restart_are_waited_for(deployment, server):
    engine = EngineConfig()
    assert seconds(server["startupProbe"]) >= 300
    assert deployment["progressDeadlineSeconds"] > engine.load_timeout + 300
    # The probe is of the server's own process, which waits for nothing: a minute of silence means
    # more than a slow node.
    assert seconds(server["livenessProbe"]) >= 60


def test_one_accelerator_is_enough_for_a_rollout(deployment):
    rolling = deployment["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 0, "maxUnavailable": 1}
    for machine, resource in MACHINES.items():
        (container,) = load(KUBERNETES / machine / "machine.yaml")["spec"]["template"]["spec"][
            "containers"
        ]
        assert container["name"] == "server"
        limits, requests = (container["resources"][what] for what in ("limits", "requests"))
        assert limits[resource] == 1
        assert limits["memory"] == requests["memory"]


def test_pods_are_locked_down(pod):
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    identity = pod["securityContext"]
    assert identity["runAsNonRoot"]
    assert identity["runAsUser"] == identity["runAsGroup"] == identity["fsGroup"] == 10001
    assert identity["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    read_only = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert read_only == {"/models": True, "/etc/gpuscore": True, "/cache": None, "/tmp": None}


def test_compiled_kernels_outlive_a_pod(pod):
    claims = [claim["metadata"]["name"] for claim in load_all(KUBERNETES / "base/volume.yaml")]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (server,) = pod["containers"]
    (mounted,) = (
        mount["name"] for mount in server["volumeMounts"] if mount["mountPath"] == "/cache"
    )
    assert volumes[mounted]["persistentVolumeClaim"]["claimName"] in claims


def test_the_benches_time_the_server_with_a_key_that_it_knows(server, compose):
    """The Job's and Compose's command lines are the parser's own, and reach the server's port."""
    (job,) = load(KUBERNETES / "bench/job.yaml")["spec"]["template"]["spec"]["containers"]
    for words, shell, keys in (
        (job["args"], job["command"], "/etc/gpuscore/api-keys"),
        (
            compose["services"]["bench"]["command"],
            compose["services"]["bench"]["entrypoint"],
            "/run/secrets/api-keys",
        ),
    ):
        values = make_parser().parse_args(words)
        assert values.url == ["http://gpuscore:8000"]
        assert values.key_file == [keys]
        assert any(
            f"--api-key-file={keys}" in argument
            for argument in (*server["args"], *compose["services"]["gpuscore"]["command"])
        )
        assert shell[:2] == ["sh", "-c"]
        assert f"cat {values.bench_output}" in shell[2]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ((), ["--url", "http://127.0.0.1:8000", "--key-file", "/etc/gpuscore/api-keys"]),
        (
            ("2", "--minutes", "1"),
            ["--model", "/models/a/b", "--serve", "--tensor-parallel 2", "--minutes", "1"],
        ),
    ],
)
def test_the_script_runs_in_the_pod_and_fetches_the_bundle(devices, words, tmp_path):
    log, kubectl = tmp_path / "log", tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >> {log}\ncase "$*" in *cat*) echo found;; esac\n'
    )
    kubectl.chmod(0o755)
    file = tmp_path / "out.json"
    done = subprocess.run(
        [KUBERNETES / "bench/run.sh", "pod-1", file, *devices],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "a/b"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "found\n"
    ran = log.read_text().split("\n")
    begin = ran.index("--") + 1
    assert ran[begin + 1 : begin + 4] == ["bench", "--output", "/tmp/bench.json"]
    assert ran[begin + 4 : begin + 4 + len(words)] == words
    make_parser().parse_args(ran[begin + 1 : begin + 4 + len(words)])


def test_compose_starts_the_server_it_means(compose):
    service = compose["services"]["gpuscore"]
    config = settings_of(service["command"]).make(ServerConfig)
    assert config.host == "0.0.0.0"
    assert service["ports"] == [f"127.0.0.1:${{SERVER_PORT:-8000}}:{config.port}"]
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert config.drain_seconds + SPARE == grace
    assert f'"127.0.0.1", {config.port}' in service["healthcheck"]["test"][-1]
    assert config.api_key_file == "/run/secrets/api-keys"
    assert set(service["secrets"]) == {"api-keys"}
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_compose_is_locked_down(compose):
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {"mem_limit", "pids_limit"} <= service.keys()
        assert ("healthcheck" in service) != ("profiles" in service), "what runs once has no health"
        assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[\w./-]+:[\w.]+\}", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            source, _, _ = volume.partition(":")
            known = source in compose["volumes"] or (DOCKER / source).is_file()
            assert known, f"{source} is neither a volume nor a file here"


def test_prometheus_reads_the_secret_that_compose_mounts(compose):
    (job,) = load(OBSERVABILITY / "prometheus.yml")["scrape_configs"]
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert job["static_configs"] == [{"targets": ["gpuscore:8000"]}]
    assert "gpuscore" in compose["services"]


def exposed_names():
    """Return the names of all samples that /metrics may have."""
    operations = Operations(ScoringService([ServedModel("demo")]))
    replicas = [ReplicaState("0", "cpu", True, NO_STATS)]
    families = [*operations.metrics.registry.collect(), *engine_metrics(replicas)]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def rules():
    return [
        rule for group in load(OBSERVABILITY / "rules.yml")["groups"] for rule in group["rules"]
    ]


def expressions():
    dashboard = json.loads((OBSERVABILITY / "grafana/gpuscore.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (variable["query"]["query"] for variable in dashboard["templating"]["list"][1:])
    yield from (rule["expr"] for rule in rules())
    for test in load(OBSERVABILITY / "rules.test.yml")["tests"]:
        yield from (series["series"] for series in test["input_series"])


def test_every_metric_that_is_asked_for_exists():
    known = exposed_names() | {rule["record"] for rule in rules() if "record" in rule}
    asked = {
        name
        for expression in expressions()
        for name in re.findall(r"gpuscore[_:][\w:]+", expression)
    }
    assert len(asked) > 40
    assert asked - known == set()


def test_the_documentation_names_every_alert():
    text = (DOCKER / "observability.md").read_text()
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert [name for name in alerts if f"`{name}`" not in text] == []
