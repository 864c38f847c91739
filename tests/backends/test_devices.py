"""Promise: `--device auto` never leaves an NVIDIA device unused in silence."""

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpuscore.backends import set_allocator
from gpuscore.backends.common import plan
from gpuscore.backends.torch.devices import choose_device
from gpuscore.errors import ConfigError

OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/"
)


@pytest.fixture
def unusable(monkeypatch, tmp_path):
    """Return the device files of a machine on which torch's CUDA build says `OLD`."""

    def init():
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plan, "NODES", tmp_path)
    for name in ("nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_device_that_cannot_be_used_is_an_error_with_its_remedy(unusable):
    with pytest.raises(ConfigError) as refusal:
        choose_device("auto")
    assert str(refusal.value) == (
        f"--device auto: this machine has an NVIDIA device, {unusable}/nvidia0, that cannot be "
        "used: The NVIDIA driver on your system is too old (found version 12040); CUDA 13.0 needs "
        "a driver of version 580 or newer, with its libraries where the dynamic linker finds them; "
        "make it usable, or choose --device cpu"
    )
    with pytest.raises(ConfigError, match=r"--device cuda.*too old.*580 or newer"):
        choose_device("cuda")
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(("minor", "name"), [(0, "NVIDIA B200"), (3, "NVIDIA B300")])
def test_a_card_whose_kernels_were_never_checked_is_refused(monkeypatch, minor, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    for capability, refused in (((10, minor), True), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)  # noqa: B023
        if not refused:
            assert choose_device("auto").type == "cuda"
            continue
        with pytest.raises(ConfigError, match=f"{name} is sm_10{minor}.*supported: sm_80, sm_89"):
            choose_device("auto")


def test_a_build_without_its_libraries_is_no_traceback(unusable, monkeypatch):
    def init():
        raise AssertionError("libcudart functions unavailable. It looks like you have a broken b")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match="be used: libcudart functions unavailable; CUDA 13.0 n"):
        choose_device("auto")


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_hidden_device_is_not_missed(unusable, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert choose_device("auto").type == "cpu"


def test_a_machine_without_a_device(unusable, caplog):
    for name in ("nvidia0", "nvidia1"):
        (unusable / name).unlink()
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto").type == "cpu"
    assert caplog.text == "", "the driver's control file alone is no device"


def test_the_cpu_build_of_torch_leaves_no_device_unused_either(unusable, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError) as refusal:
        choose_device("auto")
    assert str(refusal.value) == (
        f"--device auto: this machine has an NVIDIA device, {unusable}/nvidia0, that cannot be "
        f"used: torch {torch.__version__} is built without CUDA; make it usable, or choose "
        "--device cpu"
    )
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("build", "device", "named"),
    [
        ("2.13.0+cpu", None, "cpu"),
        ("2.13.0+cpu", "cuda", "cuda"),
        ("2.13.0", None, "nothing"),
    ],
)
def test_make_serve_names_the_device_of_the_cpu_build(tmp_path, build, device, named):
    """Without that the README's first command would fail on a machine with a GPU."""
    for place in (f"lib/python3.12/site-packages/torch-{build}.dist-info", "bin"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / ".serves").touch()
    command = tmp_path / "bin" / "gpuscore"
    command.write_text('#!/bin/sh\necho "$@ on ${GPUSCORE_DEVICE:-nothing}"\n')
    command.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "GPUSCORE_DEVICE"}
    environment |= {"GPUSCORE_DEVICE": device} if device else {}
    done = subprocess.run(
        ["make", "--no-print-directory", "serve", f"VENV={tmp_path}", "MODEL=demo", "PORT=8123"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"serve demo --port 8123 on {named}"


def test_jax_leaves_no_device_unused_either(unusable, monkeypatch):
    """JAX uses the CPU where its plugin for CUDA is missing, or finds no driver."""
    jax = pytest.importorskip("jax")
    if jax.devices()[0].platform != "cpu":
        pytest.skip("JAX uses this machine's device")
    from gpuscore.backends.jax import platform

    with pytest.raises(ConfigError, match=r"--device auto: .*nvidia0, that .*is JAX without CUDA"):
        platform.find_device("auto")
    monkeypatch.setattr(platform, "find_spec", lambda name: name == "jax_cuda13_plugin")
    with pytest.raises(ConfigError, match=r"nvidia0, that JAX cannot use: the log has JAX's reas"):
        platform.find_device("auto")
    assert platform.find_device("cpu").platform == "cpu"


# Prints what torch would read, at the moment when it is imported, and does not import it.
UP_TO_TORCH = """
import os, sys
from pathlib import Path

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print({k: v for k, v in os.environ.items() if "ALLOC_CONF" in k})
            sys.exit()

sys.meta_path.insert(0, Finder())
from gpuscore.backends import prepare
from gpuscore.config import ModelConfig
prepare(Path("."), ModelConfig())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no growing segments")
@pytest.mark.parametrize(
    ("environment", "read"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        *(
            ({name: "expandable_segments:False"}, {name: "expandable_segments:False"})
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ),
    ],
)
def test_the_allocator_is_set_before_torch_is_imported(environment, read):
    done = subprocess.run(
        [sys.executable, "-P", "-c", UP_TO_TORCH], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{read}\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no growing segments")
@pytest.mark.parametrize(
    ("release", "imported", "chosen"),
    [
        ("6.8.0-45-generic", False, "expandable_segments:True"),
        ("6.8.0-45-generic", True, None),
        ("5.15.153.1-microsoft-standard-WSL2", False, None),
    ],
)
def test_where_the_allocator_is_left_alone(monkeypatch, release, imported, chosen):
    monkeypatch.setattr(platform, "release", lambda: release)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if not imported:
        monkeypatch.delitem(sys.modules, "torch")
    set_allocator()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == chosen
