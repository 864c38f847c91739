"""Checks of docker/kubernetes: every field that kustomize writes is in Kubernetes' own schemas."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

MACHINES = ("l4", "rtx-pro-6000", "tpu-v6e")
# preStop.sleep came with 1.30.
VERSIONS = ("1.30", "1.33", "1.37")


def render(kubectl: str, directory: Path) -> list[dict]:
    command = [kubectl, "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns, for example about a deprecated field"
    return list(yaml.safe_load_all(done.stdout))


def only(objects: list[dict], kind: str) -> dict:
    (found,) = (item for item in objects if item["kind"] == kind)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_object_is_valid(kubectl, docker, machine, version):
    objects = render(kubectl, docker / "kubernetes" / machine)
    assert len(objects) == 10
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_example_secret_is_valid_and_applied_by_nothing(kubectl, docker):
    example = yaml.safe_load((docker / "kubernetes/secret.example.yaml").read_text())
    kubernetes_validate.validate(example, VERSIONS[0], strict=True)
    for machine in MACHINES:
        kinds = {item["kind"] for item in render(kubectl, docker / "kubernetes" / machine)}
        assert "Secret" not in kinds


@pytest.mark.parametrize("machine", MACHINES)
def test_names_lead_somewhere(kubectl, docker, machine):
    """Every object that the pods refer to exists under that name, except the Secret."""
    objects = render(kubectl, docker / "kubernetes" / machine)
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    spec = only(objects, "Deployment")["spec"]["template"]["spec"]
    used = {("ServiceAccount", spec["serviceAccountName"])}
    for container in (*spec["initContainers"], *spec["containers"]):
        used |= {("ConfigMap", source["configMapRef"]["name"]) for source in container["envFrom"]}
        assert container["image"].startswith("registry.example.com/gpuscore:")
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            used.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for source in volume.get("projected", {}).get("sources", ()):
            if "configMap" in source:
                used.add(("ConfigMap", source["configMap"]["name"]))
    assert len(used) == 4
    assert used <= there
    assert all(
        item["metadata"].get("namespace") == "gpuscore"
        for item in objects
        if item["kind"] != "Namespace"
    )


def with_components(docker: Path, directory: Path, *components: str) -> Path:
    """Copy the tree and switch on commented-out components of one machine; return its folder."""
    shutil.copytree(docker / "kubernetes", directory / "kubernetes")
    overlay = directory / "kubernetes/l4"
    file = overlay / "kustomization.yaml"
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(content | {"components": list(components)}))
    return overlay


def test_offline_takes_the_way_out_away(kubectl, docker, tmp_path):
    objects = render(kubectl, with_components(docker, tmp_path, "../offline"))
    policy = only(objects, "NetworkPolicy")
    assert policy["spec"]["egress"] == []
    for item in objects:
        kubernetes_validate.validate(item, VERSIONS[0], strict=True)
    (model,) = only(objects, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in model["env"]


def test_the_pod_monitor(kubectl, docker, tmp_path):
    """The PodMonitor fits the pods. Its schema, the Prometheus Operator's, is not checked."""
    objects = render(kubectl, with_components(docker, tmp_path, "../podmonitor"))
    monitor, deployment = only(objects, "PodMonitor"), only(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "gpuscore"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in server["ports"]}
    example = yaml.safe_load((docker / "kubernetes/secret.example.yaml").read_text())
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == example["metadata"]["name"]
    assert credentials["key"] in example["stringData"]
