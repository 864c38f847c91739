"""Tests of the files in docker/ with real tools. Only `make manifests-test` runs them."""

import os
import shutil
from pathlib import Path

import pytest


def tool(variable: str, package: str) -> str:
    """Return the path of a program that pip cannot install; the Makefile names it in a variable."""
    name = os.environ[variable]
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not there: {package}, or name it with make {variable}=PATH")
    return path


@pytest.fixture(scope="session")
def docker() -> Path:
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def promtool() -> str:
    return tool("PROMTOOL", "apt-get install prometheus")


@pytest.fixture(scope="session")
def kubectl() -> str:
    return tool("KUBECTL", "install kubectl 1.27 or newer (its kustomize is needed, no cluster)")
