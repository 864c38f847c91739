"""Promise: an installation from a checkout is never silent, nor a page of retries: a Python that
does not fit, and a missing network, are said in one sentence that names the way on."""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = (ROOT / "Makefile").read_text()


@pytest.fixture
def checkout(tmp_path):
    """The files that make reads before it installs anything."""
    names = ("Makefile", "pyproject.toml", "docker/locks/cuda.txt", "docker/locks/tpu.txt")
    for name in (*names, "gpuscore/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder, *arguments):
    return subprocess.run(
        ["make", "-C", folder, *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("target", ["serve", "setup", "docs"])
def test_a_python_that_does_not_fit_is_named(checkout, target):
    other = checkout / "python3.9"
    other.write_text("#!/bin/sh\necho Python 3.9\n")
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    done = make(checkout, target, f"PYTHON={other}")
    assert done.returncode == 2
    (said,) = (line for line in done.stdout.splitlines() if not line.startswith("make"))
    assert "3.11 to 3.14" in said
    assert f"{other} is not one (Python 3.9)" in said
    assert f"make {target} PYTHON=python3.12" in said
    assert not (checkout / ".venv").exists()


def test_the_newest_python_that_fits_is_taken(checkout):
    """Without PYTHON=; python3 does not fit here, and a newer one is not there."""
    for name, version in (("python3", "3.9"), ("python3.14", "3.15"), ("python3.13", "3.13")):
        file = checkout / "bin" / name
        file.parent.mkdir(exist_ok=True)
        code = f"import sys; sys.version_info = {tuple(map(int, version.split('.')))}; "
        file.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\"$2\"\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {name: kept for name, kept in os.environ.items() if name != "PYTHON"}
    command = ["make", "-C", checkout, "-n", "setup"]
    done = subprocess.run(
        command, env=environment | {"PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert "by python3.13, " in done.stdout


def install(*arguments, **variables):
    """Run tools/install.py with pip's settings of `variables` alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, "-P", ROOT / "tools" / "install.py", *arguments],
        env=kept | {"PIP_CONFIG_FILE": os.devnull} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("by_proxy", [False, True])
def test_without_a_network_there_is_one_sentence(tmp_path, by_proxy):
    dead = f"http://127.0.0.1:{closed_port()}"
    variables = {"PIP_INDEX_URL": f"{'https://index.invalid' if by_proxy else dead}/simple"}
    if by_proxy:
        variables |= {"HTTPS_PROXY": dead, "https_proxy": dead, "NO_PROXY": "", "no_proxy": ""}
    download = ("download", "--no-deps", "-d", str(tmp_path), "no-such-package-of-ours==1.2")
    done = install("a package: seconds", *download, **variables)
    assert done.returncode == 1
    assert done.stdout.startswith("a package: seconds\n")
    (said,) = done.stderr.splitlines()
    assert "cannot reach its package index (" in said
    assert "PIP_INDEX_URL" in said


def wheel(folder):
    """Make a package of one file, as pip reads it."""
    folder.mkdir()
    info = "ours-1.2.dist-info"
    with zipfile.ZipFile(folder / "ours-1.2-py3-none-any.whl", "w") as made:
        made.writestr("ours.py", "")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ours\nVersion: 1.2\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        made.writestr(f"{info}/WHEEL", tags)
        made.writestr(f"{info}/RECORD", "")
    return folder


def test_what_the_first_index_lacks_comes_from_the_second(tmp_path):
    """An index on disk has a folder for each package."""
    (tmp_path / "empty" / "ours").mkdir(parents=True)
    wheel(tmp_path / "index")
    (tmp_path / "second" / "ours").mkdir(parents=True)
    page = tmp_path / "second" / "ours" / "index.html"
    file = tmp_path / "index" / "ours-1.2-py3-none-any.whl"
    page.write_text(
        f'<!doctype html><html><body><a href="{file.as_uri()}">{file.name}</a></body></html>'
    )
    (tmp_path / "empty" / "ours" / "index.html").write_text("<!doctype html><html></html>")
    second = ("--or-extra-index-url", (tmp_path / "second").as_uri())
    download = ("download", "--no-deps", "-d", str(tmp_path / "out"), "ours==1.2")
    first = {"PIP_INDEX_URL": (tmp_path / "empty").as_uri()}
    done = install("ours: seconds", *second, *download, **first)
    assert done.returncode == 0, done
    assert (tmp_path / "out" / file.name).exists()
    assert re.fullmatch(r"ours: seconds\n  done, \d+ s\n", done.stdout)
    assert done.stderr == ""
    done = install("ours: seconds", *download, **first)
    assert done.returncode == 1
    assert "No matching distribution found for ours==1.2" in done.stderr


def test_a_silent_step_shows_that_it_lives(tmp_path):
    """An index that takes 11 seconds to say that it has nothing."""
    with socket.create_server(("127.0.0.1", 0)) as slow:
        url = f"http://127.0.0.1:{slow.getsockname()[1]}/simple"
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                ROOT / "tools" / "install.py",
                "x",
                "download",
                "-d",
                tmp_path,
                "x",
            ],
            env=os.environ | {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull},
            stdout=subprocess.PIPE,
            text=True,
        )
        start = time.monotonic()
        assert process.stdout.readline() == "x\n"
        assert re.fullmatch(r"  1\d s\n", process.stdout.readline())
        assert time.monotonic() - start > 9
        process.kill()
        process.communicate()


def test_no_recipe_calls_pip_by_itself():
    """tools/install.py says what is done; the environments it fills are made after the check."""
    assert RECIPES.count("$(PIP) '") >= 10
    assert not re.search(r"-m pip|/pip ", RECIPES)
    assert '"pip"' not in (ROOT / "tests/other_clients" / "run.py").read_text()
    assert RECIPES.count("$(PYTHON) -m venv") == 1
    for said in re.findall(r"\$\(PIP\) '([^']*)'", RECIPES):
        assert re.search(r": .*(seconds|minutes?)( or two)?$", said), said
