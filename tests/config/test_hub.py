"""Promise: a model's name becomes a directory, or an error says what to do. The hub is unreachable
here, which is one of the cases."""

import pytest

from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory


def test_a_directory_as_given(tmp_path):
    assert model_directory(str(tmp_path)) == tmp_path


def test_the_demo_is_inside_the_package():
    assert (model_directory("demo") / "config.json").is_file()


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no", "a/b/c"])
def test_a_directory_that_is_not_there(name):
    with pytest.raises(ConfigError, match="does not exist"):
        model_directory(name)


@pytest.mark.parametrize("revision", [None, "main"])
def test_offline_says_what_to_do(revision, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        model_directory("Qwen/Qwen3-0.6B", revision)


def test_a_name_that_cannot_be_one():
    with pytest.raises(ConfigError, match="neither a directory nor a valid hub name"):
        model_directory("not a name!")
