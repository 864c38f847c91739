"""Promise: the wheel has everything that the package reads, names its commit, and is the same at
every build. `make release` installs it with every extra."""

import os
import re
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from gpuscore import __version__

ROOT = Path(__file__).parents[1]


def build(folder: Path, source: Path = ROOT) -> Path:
    """Build with the backend that pyproject.toml names, which is installed here; no network."""
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a clone of HEAD, as on another machine."""
    folder = tmp_path_factory.mktemp("clone") / "gpuscore"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return a folder with the wheel's files, and no checkout on the path beside it."""
    folder = tmp_path_factory.mktemp("installed")
    ZipFile(wheel).extractall(folder)
    return folder


def run(installed, *command):
    return subprocess.run(
        [sys.executable, "-P", *command],
        env=os.environ | {"PYTHONPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_the_wheel_has_every_file_of_the_package(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "gpuscore", "kernels/gpuscore_kernels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wanted = {name.removeprefix("kernels/") for name in tracked if (ROOT / name).exists()}
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info" not in name}
    assert len(wanted) > 300
    assert wanted <= packed
    assert "gpuscore/commit.txt" in packed


def test_two_builds_have_the_same_bytes(clone, tmp_path):
    first, second = (build(tmp_path / name, clone) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_the_installed_command_names_its_commit(installed, wheel):
    packed = ZipFile(wheel).read("gpuscore/commit.txt").decode().strip()
    assert re.fullmatch("[0-9a-f]{7,40}(-dirty)?", packed)
    said = run(installed, "-m", "gpuscore", "--version")
    assert said == f"gpuscore {__version__} (commit {packed})\n"


def test_the_page_installs_the_wheel_that_is_built(wheel):
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    named = re.findall(r"^pip install '\./(\S+\.whl)\[(\w+)\]'$", text, re.MULTILINE)
    metadata = Parser().parsestr(
        ZipFile(wheel).read(f"gpuscore-{__version__}.dist-info/METADATA").decode()
    )
    assert named == [(wheel.name, "serve")]
    assert "serve" in metadata.get_all("Provides-Extra")


def test_only_what_is_tested_is_declared():
    """Python of the matrix in .github, PyTorch of the Makefile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())[1]
    versions = [int(minor) for minor in re.findall(r'"3\.(\d+)"', matrix)]
    assert project["requires-python"] == f">=3.{min(versions)},<3.{max(versions) + 1}"
    tested = re.search(r"^TORCH \?= torch==2\.(\d+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert f"torch>=2.{tested},<2.{int(tested) + 1}" in project["optional-dependencies"]["serve"]


@pytest.mark.parametrize("folder", ["gpuscore", "docs", "examples", "docker"])
def test_nothing_installs_gpuscore_by_its_name(folder):
    """Refuse the name, which nobody has claimed on a package index."""
    by_name = re.compile(r"pip install [^\n`]*(?<![./-])gpuscore(?![\w.-]*\.whl)")
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".md", ".yaml", ".sh", ".toml") and path.name != "CHANGELOG.md":
            assert not by_name.search(path.read_text(encoding="utf-8")), path
