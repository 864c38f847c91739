"""Promise: `gpuscore doctor` names what would keep a server from starting, with a remedy."""

import os
import re
import shutil
import socket
import tomllib
from collections import defaultdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpuscore.commands import doctor
from gpuscore.commands.cli import main
from gpuscore.commands.doctor import unmet
from gpuscore.config import ModelConfig, ServerConfig

ROOT = Path(__file__).parents[1]
CHECKS = {
    *("Python", "packages", "extras", "device", "Triton", "CPU", "C compiler", "memory"),
    *("models", "address", "API key"),
}


def checks_of(capsys, *words) -> tuple[int, dict[str, dict[str, str]]]:
    code, checks = main(["doctor", "--device", "cpu", *words]), {}
    for line in capsys.readouterr().out.splitlines():
        if finding := re.fullmatch(r"(OK|warning|problem) +(\w+(?: \w+)*) {2,}(.*)", line):
            checks[finding[2]] = {"level": finding[1], "found": finding[3], "remedy": ""}
            latest = checks[finding[2]]
        elif "  -> " in line:
            latest["remedy"] = line.partition("-> ")[2]
    return code, checks


def findings(device="cpu"):
    model, server = ModelConfig(device=device), ServerConfig(port=0)
    return {finding.name: finding for finding in doctor.examine(model, server)}


def test_a_machine_that_can_serve(capsys):
    code, checks = checks_of(capsys, "--port", "0")
    assert code == 0, checks
    assert checks.keys() == CHECKS
    assert not [check for check in checks.values() if check["level"] == "problem"]


@pytest.mark.parametrize(
    ("has", "used"),
    [
        ({"avx512_bf16", "avx512_f", "avx2"}, "avx512_bf16 in products, avx512_bf16 in attention"),
        ({"amx_bf16", "avx512_bf16", "avx2"}, "amx_bf16 in products, avx512_bf16 in attention"),
        ({"amx_bf16", "avx2"}, "amx_bf16 in products, avx2 in attention"),
    ],
)
def test_the_instructions_that_are_used_are_named(capsys, monkeypatch, has, used):
    known = defaultdict(bool, architecture="x86_64") | dict.fromkeys(has, True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: known)
    assert used in checks_of(capsys, "--port", "0")[1]["CPU"]["found"]


def test_an_extra_is_there_with_all_that_it_asks_for(capsys, monkeypatch):
    """OpenTelemetry's API comes with other packages; traces need its SDK and the exporter."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = checks_of(capsys, "--port", "0")[1]["extras"]["found"]
    shown = dict(extra.split(" ", 1) for extra in extras.split(", "))
    assert shown.keys() == asked.keys() - {"cuda", "hopper", "dev", "images", "docs"}
    assert shown["otel"] == "yes"
    assert shown["ray"] == ("yes" if find_spec("ray") else "no (ray is missing)")

    def only_the_api(name):
        if name == "opentelemetry-sdk":
            raise PackageNotFoundError
        return version(name)

    monkeypatch.setattr("gpuscore.commands.doctor.version", only_the_api)
    assert (
        "otel no (opentelemetry-sdk is missing)"
        in checks_of(capsys, "--port", "0")[1]["extras"]["found"]
    )


def test_a_table_for_people(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--device", "cpu", "--port", port]) == 1
    lines = capsys.readouterr().out.splitlines()
    (index,) = (i for i, line in enumerate(lines) if line.startswith("problem  address"))
    assert f"--port {port}" in lines[index]
    assert lines[index + 1].strip().startswith("-> choose another --port")
    assert lines[-1].endswith("1 problem")


@pytest.mark.parametrize(
    ("words", "name", "text"),
    [
        (("--host", "0.0.0.0", "--port", "0"), "API key", "set GPUSCORE_API_KEY or --api-key-file"),
        (("--port", "0", "--api-key-file", "/nowhere"), "API key", "mend the file"),
        (("--host", "203.0.113.7", "--port", "0"), "address", "choose another --port"),
    ],
)
def test_an_address_that_cannot_be_served(capsys, words, name, text):
    code, checks = checks_of(capsys, *words)
    assert code == 1
    assert checks[name]["level"] == "problem"
    assert text in checks[name]["remedy"]


def test_a_device_that_cannot_be_used():
    device = findings("cuda")["device"]
    assert device.level == "problem"
    assert "sees no CUDA device" in device.state
    assert device.remedy


def test_too_little_memory_and_no_compiler(monkeypatch):
    monkeypatch.setattr(doctor.HostMemory, "free", lambda self: 2**30)
    monkeypatch.setenv("CC", "no-such-compiler")
    found = findings()
    assert found["memory"].level == "warning"
    assert "1,024.0 MiB" in found["memory"].state
    assert found["C compiler"].level == "warning"
    assert "install gcc" in found["C compiler"].remedy


def test_folders(tmp_path, monkeypatch):
    cache = "huggingface_hub.constants.HF_HUB_CACHE"
    free = 2**40
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    monkeypatch.setattr(cache, str(tmp_path / "not" / "yet"))
    assert findings()["models"].level == "OK"
    with monkeypatch.context() as closing:  # by its mode, nothing would be closed to root
        closing.setattr(os, "access", lambda path, mode: False)
        closed = findings()["models"]
    assert closed.level == "warning"
    assert "set HF_HOME" in closed.remedy
    free = 2**30
    small = findings()["models"]
    assert (small.level, "1.0 GiB free" in small.state) == ("warning", True)
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(cache, str(file))
    assert "cannot be written to" in findings()["models"].state


@pytest.fixture
def on_cuda(monkeypatch):
    """Let torch see a CUDA device."""
    monkeypatch.setattr(doctor, "choose_device", lambda name: doctor.torch.device("cuda"))
    monkeypatch.setattr(doctor.torch.cuda, "mem_get_info", lambda: (2**34, 2**35))
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    return partial(findings, "cuda")


def test_packages_of_other_versions_than_gpuscore_asks_for():
    assert unmet("torch>=2") is None
    assert unmet("torch<2").startswith("torch is 2.")
    assert unmet("no-such-package>=1") == "no-such-package is missing"
    assert unmet("no-such-package>=1; extra == 'jax'") is None


@pytest.mark.parametrize(
    ("version", "level"), [("575.57.08", "problem"), ("580.65.06", "OK"), ("590.1", "OK")]
)
def test_drivers(tmp_path, monkeypatch, on_cuda, version, level):
    file = tmp_path / "version"
    file.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Release Build")
    monkeypatch.setattr(doctor, "DRIVER_FILE", file)
    finding = on_cuda()["driver"]
    assert finding.level == level
    assert finding.state.startswith(f"{version}; CUDA 13.0 needs 580")


@pytest.mark.parametrize("name", ["gcc", None])
def test_the_compiler_of_triton(monkeypatch, on_cuda, name):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda word: name)
    finding = on_cuda()["Triton"]
    assert finding.level == ("OK" if name else "problem")
    assert name or "install gcc" in finding.remedy
