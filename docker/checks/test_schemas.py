"""Checks of docker/compose.yaml, .github and the dashboard by their tools' schemas."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(file.stem for file in (ROOT / ".github/workflows").glob("*.yml"))
CHECKED = [("github-workflows", ROOT / f".github/workflows/{n}.yml", "runs-on:") for n in WORKFLOWS]
CHECKED.append(("compose-spec", ROOT / "docker/compose.yaml", "read_only: true"))
CHECKED.append(("dependabot", ROOT / ".github/dependabot.yml", "schedule:"))


def schema_errors(schema: str, path: Path) -> str:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize(("schema", "path", "key"), CHECKED, ids=lambda value: str(value)[-20:])
def test_a_file_has_known_keys_only(schema, path, key, tmp_path):
    assert schema_errors(schema, path) == ""
    wrong = tmp_path / path.name
    wrong.write_text(path.read_text().replace(key, key.upper(), 1))
    assert key.split(":")[0].upper() in schema_errors(schema, wrong)


def lost(sent, kept, path: str = "$") -> Iterator[str]:
    """Yield the paths of everything in `sent` that `kept` does not have."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        for key, value in sent.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        for index, (element, other) in enumerate(zip(sent, kept, strict=True)):
            yield from lost(element, other, f"{path}[{index}]")
    elif sent != kept:
        yield path


@pytest.fixture(scope="module")
def through_the_schema():
    """Return a function that reads JSON into Grafana's classes and back, losing unknown fields."""
    register_default_plugins()
    return lambda raw: json.loads(JSONEncoder().encode(Dashboard.from_json(raw)))


def test_dashboard(docker, through_the_schema):
    raw = json.loads((docker / "observability/grafana/gpuscore.json").read_text())
    assert list(lost(raw, through_the_schema(raw))) == []
    raw["panels"][1]["options"]["colourMode"] = "value"
    raw["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    assert list(lost(raw, through_the_schema(raw))) == [
        "$.panels[1].fieldConfig.defaults.units",
        "$.panels[1].options.colourMode",
    ]
