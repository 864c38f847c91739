"""Promise: a kernel that was compiled ahead is found by its sizes and by what made it; one that is
neither kept nor can be compiled here is refused with the command that installs what is missing.
"""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpuscore_kernels import hopper
from gpuscore_kernels.row_functions.build import BuildError


def test_a_librarys_name_follows_from_sizes_and_source(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ("attention", 128, 2), ("attention", 128, 1), ("attention", 64, 2), ("product",)
    libraries = {hopper.library_of(*name) for name in names}
    assert len(libraries) == len(names)
    assert {library.parent for library in libraries} == {tmp_path}
    source = tmp_path / "hopper.py"
    source.write_text(Path(hopper.__file__).read_text() + "# another\n")
    monkeypatch.setattr(hopper, "__file__", str(source))
    assert hopper.library_of("product") not in libraries


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is not None, reason="it is installed")
def test_what_is_missing_is_named_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert hopper.why_not("attention", 128, 2).endswith("pip install 'gpuscore[hopper]'")
    with pytest.raises(BuildError, match="failed with exit code 1"):
        hopper.load("attention", 128, 2)


def test_the_extra_has_one_version_of_what_compiles():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["hopper"]
    asked = {each.name: str(each.specifier) for each in map(Requirement, extra)}
    for name in ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"):
        assert asked[name].startswith("==")
