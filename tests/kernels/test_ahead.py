"""Promise: a kernel that was compiled ahead is found by all that it was made of, and one that is
neither kept nor can be compiled here is refused with the command that installs what is missing."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpuscore_kernels import ahead
from gpuscore_kernels.row_functions.build import BuildError

MODULE = "gpuscore_kernels.hopper_attention.kernel"
needs_no_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is not None, reason="the compiler is installed"
)


def test_a_librarys_name_follows_from_sizes_source_and_versions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "some_kernel.py"
    source.write_text("A = 1\n")
    first = ahead.library_of("some_kernel", (128, 2), tmp_path)
    assert first == ahead.library_of("some_kernel", (128, 2), tmp_path)
    others = [ahead.library_of("some_kernel", sizes, tmp_path) for sizes in ((128, 1), (64, 2))]
    source.write_text("A = 2\n")
    others.append(ahead.library_of("some_kernel", (128, 2), tmp_path))
    source.write_text("A = 1\n")
    for package in ahead.PACKAGES:
        monkeypatch.setitem(ahead.PACKAGES, package, "0")
        others.append(ahead.library_of("some_kernel", (128, 2), tmp_path))
    assert len({first, *others}) == 1 + len(others)


def test_its_folder_is_tritons(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert ahead.library_of(MODULE, (128, 2)).parent == tmp_path


@needs_no_compiler
def test_what_is_missing_is_named_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        BuildError, match=r"pip install \S+, or the extra hopper|extra hopper .* pip install"
    ):
        ahead.load(MODULE, 128, 2)


def test_the_extra_has_the_versions_that_kernels_are_made_of():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["hopper"]
    asked = {each.name: str(each.specifier) for each in map(Requirement, extra)}
    assert {name: asked[name] for name in ahead.PACKAGES} == {
        name: f"=={version}" for name, version in ahead.PACKAGES.items()
    }
