"""Checks of docker/kubernetes: every field that kustomize writes is in Kubernetes' own schemas."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

MACHINES = ("h100", "l4", "rtx-pro-6000", "tpu-v5e", "tpu-v6e")
# preStop.sleep came with 1.30.
VERSIONS = ("1.30", "1.33", "1.37")


def render(kubectl: str, directory: Path) -> list[dict]:
    command = [kubectl, "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns, for example about a deprecated field"
    return list(yaml.safe_load_all(done.stdout))


def only(objects: list[dict], kind: str) -> dict:
    (match,) = (item for item in objects if item["kind"] == kind)
    return match


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_object_is_valid(kubectl, docker, machine, version):
    objects = render(kubectl, docker / "kubernetes" / machine)
    assert len(objects) == 11
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bench_is_valid_and_reaches_the_server(kubectl, docker, version):
    objects = render(kubectl, docker / "kubernetes/bench")
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)
    pod = only(objects, "Job")["spec"]["template"]
    policies = {entry["metadata"]["name"]: entry["spec"] for entry in objects if "spec" in entry}
    chosen = policies["gpuscore-bench"]["podSelector"]["matchLabels"]
    assert chosen.items() <= pod["metadata"]["labels"].items()
    (rule,) = policies["gpuscore-from-bench"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": chosen}}]


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
    assert len(used) == 5
    assert used <= there
    inside = [item["metadata"] for item in objects if item["kind"] != "Namespace"]
    assert {about.get("namespace") for about in inside} == {"gpuscore"}


def test_offline_takes_the_way_out_away(kubectl, docker, tmp_path):
    shutil.copytree(docker / "kubernetes", tmp_path / "kubernetes")
    file = tmp_path / "kubernetes/l4/kustomization.yaml"
    content = yaml.safe_load(file.read_text()) | {"components": ["../offline"]}
    file.write_text(yaml.safe_dump(content))
    objects = render(kubectl, file.parent)
    assert only(objects, "NetworkPolicy")["spec"]["egress"] == []
    for item in objects:
        kubernetes_validate.validate(item, VERSIONS[0], strict=True)
    (model,) = only(objects, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in model["env"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_the_ray_service(docker, version):
    """KubeRay's own schema is not checked, nor what it adds to the pods."""
    manifest = docker.parent / "deploy/ray/rayservice.yaml"
    cluster = yaml.safe_load(manifest.read_text())["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}} | group["template"]
        kubernetes_validate.validate(pod, version, strict=True)
