"""Promise: the chart names what the server has. `make manifests-test` renders it with Helm's own
library."""

import json
import re
from pathlib import Path

import yaml

from gpuscore import __version__
from gpuscore.commands.cli import make_parser
from gpuscore.config import ServerConfig
from gpuscore.config.sources import OPTIONS, read_settings

ROOT = Path(__file__).parents[2]
HELM = ROOT / "docker/helm"


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
