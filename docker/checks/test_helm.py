"""Checks of docker/helm: Helm's own library renders the chart, and every field that it writes is in
Kubernetes' own schemas."""

import tomllib
from pathlib import Path

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).parents[1] / "helm"
BASE = yaml.safe_load((CHART.parent / "kubernetes/base/deployment.yaml").read_text())
VERSIONS = ("1.30", "1.33", "1.37")
OPERATORS = ("ServiceMonitor", "ScaledObject")  # kinds that are not Kubernetes' own
SHARED = {"cache": {"accessMode": "ReadWriteMany"}}
VALUES = {
    "plain": {},
    "cpu": {"device": "cpu", "model": "demo"},
    "tpu": {"device": "tpu", "nodeSelector": {"cloud.google.com/gke-tpu-topology": "1x1"}},
    "settings": {"settings": {"max_items": 5, "family": "none", "ui": False, "body_timeout": 7.5}},
    "own volume": {"cache": {"existingClaim": "models"}, "replicas": 3},
    "image": {"image": {"repository": "r/x", "tag": "y"}, "tolerations": [{"key": "k"}]},
    "operators": SHARED | {"keda": {"enabled": True}, "serviceMonitor": {"enabled": True}},
}


def render(values: dict) -> list[dict]:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="scores", namespace="ml")
    objects = (rendered for text in files.values() for rendered in yaml.safe_load_all(text))
    return [rendered for rendered in objects if rendered]


def only(objects: list[dict], kind: str) -> dict:
    (match,) = (item for item in objects if item["kind"] == kind)
    return match


def pod_of(objects: list[dict]) -> dict:
    return only(objects, "Deployment")["spec"]["template"]["spec"]


def server_of(objects: list[dict]) -> dict:
    (server,) = pod_of(objects)["containers"]
    return server


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_linter_finds_nothing(values):
    linted = helm.lint(CHART, values, strict=True)
    assert linted["errors"] == []
    assert {message["error"] for message in linted["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_object_is_valid(values, version):
    objects = render(values)
    assert len(objects) >= 4
    for item in objects:
        if item["kind"] not in OPERATORS:
            kubernetes_validate.validate(item, version, strict=True)


def test_a_pod_is_as_careful_as_the_manifests():
    """Probes, stop and confinement equal the manifests' in docker/kubernetes."""
    ours, theirs = pod_of(render({})), BASE["spec"]["template"]["spec"]
    for name in ("securityContext", "terminationGracePeriodSeconds", "enableServiceLinks"):
        assert ours[name] == theirs[name]
    (server,), (base,) = ours["containers"], theirs["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
        assert server[name] == base[name]
    assert server["securityContext"] == base["securityContext"]
    assert ours["initContainers"][0]["securityContext"] == base["securityContext"]


@pytest.mark.parametrize(
    ("device", "chip"), [("cuda", "nvidia.com/gpu"), ("tpu", "google.com/tpu")]
)
def test_the_device_chooses_image_and_chip(device, chip):
    server = server_of(render({"device": device}))
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert server["image"].endswith(f":{version}-{device}")
    assert server["resources"]["limits"] == {"memory": "11Gi", chip: 1}
    on_cpu = server_of(render({"device": "cpu"}))
    assert on_cpu["resources"]["limits"] == {"memory": "11Gi"}


def test_names_lead_somewhere():
    objects = render(VALUES["operators"])
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    pod, labels = (
        pod_of(objects),
        only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"],
    )
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    (config, _) = volumes["config"]["projected"]["sources"]
    assert {("PersistentVolumeClaim", claim), ("ConfigMap", config["configMap"]["name"])} <= there
    service, monitor = only(objects, "Service"), only(objects, "ServiceMonitor")
    assert service["spec"]["selector"].items() <= labels.items()
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    target = only(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    assert ("Deployment", target) in there
    assert "replicas" not in only(objects, "Deployment")["spec"], "KEDA sets them"


def test_settings_become_the_servers_file():
    values = VALUES["settings"]
    text = only(render(values), "ConfigMap")["data"]["gpuscore.toml"]
    assert tomllib.loads(text) == values["settings"]
    annotations = [
        only(render(overrides), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        for overrides in ({}, values)
    ]
    assert annotations[0] != annotations[1], "a new setting must replace the pods"


def test_only_models_of_the_hub_are_downloaded():
    assert pod_of(render({}))["initContainers"][0]["command"][2] == "Qwen/Qwen3-Reranker-0.6B"
    for model in ("demo", "/opt/model"):
        assert "initContainers" not in pod_of(render({"model": model}))
        assert not any("revision" in word for word in server_of(render({"model": model}))["args"])


def test_several_pods_need_a_volume_for_several():
    for values in ({"replicas": 2}, {"keda": {"enabled": True}}):
        with pytest.raises(helm.HelmRenderError, match="several pods share the cache"):
            render(values)
    assert only(render(SHARED | {"replicas": 2}), "Deployment")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    "values",
    [
        {"device": "gpu"},
        {"modle": "demo"},
        {"replicas": 0},
        {"settings": {"port": 1}},
        {"keys": ""},
        {"cache": {"mode": "x"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values):
    with pytest.raises(helm.HelmError):
        render(values)
