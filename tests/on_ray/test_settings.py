"""Promise: the application's arguments are gpuscore's settings with the same checks; what has no
meaning under Ray is refused by name; the files in deploy/ray hold what Ray and it understand."""

from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from gpuscore.config.sources import OPTIONS
from gpuscore.errors import ConfigError
from gpuscore.ray import app
from gpuscore.ray.settings import RAYS, read_arguments

DEPLOY = Path(__file__).parents[2] / "deploy/ray"


def test_text_and_values_are_the_same() -> None:
    as_text = {"model": "demo", "max_batch_tokens": "64", "ui": "false", "kv_cache_size": "1MiB"}
    typed = {"model": "demo", "max_batch_tokens": 64, "ui": False, "kv_cache_size": 2**20}
    settings = read_arguments(as_text)
    assert settings == read_arguments(typed)
    assert settings.model.max_batch_tokens == 64


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"max_batch_token": 5}, "there is no argument max_batch_token; "),
        ({"max_batch_tokens": 0}, "--max-batch-tokens must be an integer of at least 1"),
        ({"prefix_cache": "perhaps"}, "must be true or false"),
        ({"config": "gpuscore.toml"}, "there is no argument config"),
        *(({name: 1}, f"argument {name} has no meaning here") for name in RAYS),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        app(arguments)
    assert part in str(raised.value)


def test_the_refused_settings_are_ones_of_the_server() -> None:
    assert OPTIONS.keys() >= RAYS


def test_the_serve_config_is_one_that_ray_and_the_application_take() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == f"{app.__module__.rpartition('.')[0]}:app"
    names = {deployment.name for deployment in application.deployments}
    assert names <= {"engine", "http"}
    app(application.args)


def test_the_manifest_holds_the_same_application() -> None:
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    own = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == own
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    (application,) = own["applications"]
    (engine,) = (each for each in application["deployments"] if each["name"] == "engine")
    assert workers["maxReplicas"] == engine["autoscaling_config"]["max_replicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > (
        read_arguments(application["args"]).server.drain_seconds
    )
    assert cluster["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
