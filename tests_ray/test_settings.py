"""Promise: the application's arguments are gpuscore's settings with the same checks; what has no
meaning under Ray is refused by name; the files in deploy/ray hold what Ray and it understand."""

from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import options
from gpuscore.errors import ConfigError
from gpuscore.ray import app
from gpuscore.ray.settings import REFUSED, RayConfig, read_arguments

DEPLOY = Path(__file__).parents[1] / "deploy/ray"


def test_text_and_values_are_the_same() -> None:
    as_text = {"model": "demo", "max_batch_tokens": "64", "ui": "false", "kv_cache_size": "1MiB"}
    as_text |= {"min_replicas": "2", "target_wait": "0.5", "resources": "TPU=1,a=0.5"}
    typed = {"model": "demo", "max_batch_tokens": 64, "ui": False, "kv_cache_size": 2**20}
    typed |= {"min_replicas": 2, "target_wait": 0.5, "resources": "TPU=1,a=0.5"}
    settings = read_arguments(as_text)
    assert settings == read_arguments(typed)
    assert settings.model.max_batch_tokens == 64
    assert settings.ray.custom == {"TPU": 1.0, "a": 0.5}
    assert settings.ray.most == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"max_batch_token": 5}, "the closest is max_batch_tokens"),
        ({"max_batch_tokens": 0}, "--max-batch-tokens must be an integer of at least 1"),
        ({"min_replicas": 0}, "min_replicas must be an integer of at least 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2 is below min_replicas 3"),
        ({"resources": "TPU"}, "resources TPU: must be NAME=AMOUNT"),
        ({"num_gpus": "2"}, "num_gpus must be a number from 0.0 to 1.0"),
        ({"prefix_cache": "perhaps"}, "must be true or false"),
        ({"config": "gpuscore.toml"}, "there is no argument config"),
        *(({name: 1}, f"argument {name} ") for name in REFUSED),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        app(arguments)
    assert part in str(raised.value)


def test_no_name_has_two_meanings() -> None:
    own = {item.name for item in options(RayConfig)}
    settings = {
        item.name for item in options(ModelConfig, ServerConfig, RequestLimits, EngineConfig)
    }
    assert not own & settings
    assert settings >= REFUSED.keys()


def test_every_argument_of_its_own_is_explained() -> None:
    page = (DEPLOY.parents[1] / "docs/how-to/ray.md").read_text()
    assert all(f"`{item.name}`" in page for item in options(RayConfig))


def test_the_serve_config_is_one_that_ray_and_the_application_take() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == f"{app.__module__.rpartition('.')[0]}:app"
    settings = read_arguments(application.args)
    assert (settings.ray.min_replicas, settings.ray.most) == (1, 4)
    app(application.args)


def test_the_manifest_holds_the_same_application() -> None:
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    own = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == own
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    settings = read_arguments(own["applications"][0]["args"])
    assert workers["maxReplicas"] == settings.ray.most
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > (
        settings.server.drain_seconds
    )
    assert cluster["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
