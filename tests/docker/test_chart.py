"""Promise: the chart and the manifests for KServe name what the server has. `make manifests-test`
renders the chart with Helm's own library."""

import json
import re
from pathlib import Path

import pytest
import yaml

from gpuscore import __version__
from gpuscore.commands.cli import make_parser
from gpuscore.config import ServerConfig
from gpuscore.config.sources import OPTIONS, read_settings
from gpuscore.dialects.platforms import platform_routes

ROOT = Path(__file__).parents[2]
HELM, KSERVE = ROOT / "docker/helm", ROOT / "docker/kserve"


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_chart_has_the_packages_version():
    chart = load(HELM / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_the_schema_has_every_value():
    values, schema = (
        load(HELM / "values.yaml"),
        json.loads((HELM / "values.schema.json").read_text()),
    )

    def missing(values, rules, place=""):
        known = rules.get("properties", {})
        for name, value in values.items():
            if name not in known and rules.get("additionalProperties") is False:
                yield f"{place}{name}"
            elif isinstance(value, dict):
                yield from missing(value, known.get(name, {}), f"{place}{name}.")

    assert [*missing(values, schema)] == []
    assert set(schema["properties"]) - set(values) == {"global"}


def test_the_command_line_is_the_servers_own():
    template = (HELM / "templates/deployment.yaml").read_text()
    block = re.search(r"          args:\n            - serve\n(.*?)          env:", template, re.S)[
        1
    ]
    words = re.findall(r"^            - (--\S+)$", block, re.M)
    words = [re.sub(r"\{\{.*\}\}|/etc/gpuscore/gpuscore.toml", "x", word) for word in words]
    flags = [word for word in words if not word.startswith("--config")]
    settings = read_settings(vars(make_parser().parse_args(["serve", "demo", *flags])), {})
    config = settings.make(ServerConfig)
    assert (config.host, config.port, config.api_key_file) == (
        "0.0.0.0",
        8000,
        "/etc/gpuscore/api-keys",
    )
    reserved = json.loads((HELM / "values.schema.json").read_text())["properties"]["settings"]
    assert set(reserved["propertyNames"]["not"]["enum"]) <= {*OPTIONS}


@pytest.fixture
def runtime():
    (container,) = load(KSERVE / "servingruntime.yaml")["spec"]["containers"]
    return container


def test_the_runtime_of_kserve_asks_what_the_server_has(runtime):
    settings = read_settings(vars(make_parser().parse_args(runtime["args"])), {})
    config = settings.make(ServerConfig)
    (port,) = runtime["ports"]
    assert port["containerPort"] == config.port
    assert settings.chosen["model"].value == "/mnt/models"
    routes = platform_routes(config.routes, ["m"], {})
    for probe in ("readinessProbe", "livenessProbe"):
        asked = runtime[probe]["httpGet"]
        assert asked["port"] == config.port
        assert asked["path"] in {*routes.ready, *routes.live}
    assert "GPUSCORE_API_KEY" in {variable["name"] for variable in runtime["env"]}, (
        "kserve needs a key"
    )


def test_the_model_of_kserve_is_for_the_runtime():
    runtime, service = (load(KSERVE / f"{n}.yaml") for n in ("servingruntime", "inferenceservice"))
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = {supported["name"] for supported in runtime["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
