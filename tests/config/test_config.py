"""Promise: an option may be set in three places, and the strongest wins."""

import itertools
from pathlib import Path

import pytest

from gpuscore import Scorer
from gpuscore.config import CONFIGS, EngineConfig, ModelConfig
from gpuscore.config.options import checked, options
from gpuscore.config.sources import KUBERNETES, read_settings
from gpuscore.errors import ConfigError
from support.settings import OPTIONS, SOURCES, each_option, parsed, read, source_name, two_values


@each_option
def test_every_option_from_every_source(item, tmp_path):
    (config,) = [c for c in CONFIGS if item.name in {o.name for o in options(c)}]
    for source, value in itertools.product(SOURCES, two_values(item)):
        settings = read(tmp_path, {source: {item.name: value}})
        got = settings.chosen[item.name]
        assert (got.value, type(got.value)) == (value, type(value))
        assert got.source == source_name(source, "GPUSCORE_" + item.name.upper(), tmp_path)
        others = [setting for name, setting in settings.chosen.items() if name != item.name]
        assert {other.source for other in others} == {"default"}
        assert getattr(settings.make(config), item.name) == value


@each_option
def test_the_stronger_source_wins(item, tmp_path):
    for weak, strong in itertools.combinations(SOURCES, 2):
        for below, above in itertools.permutations(two_values(item)):
            settings = read(tmp_path, {weak: {item.name: below}, strong: {item.name: above}})
            got = settings.chosen[item.name]
            assert got.value == above
            assert got.source == source_name(strong, "GPUSCORE_" + item.name.upper(), tmp_path)


def test_defaults():
    settings = read_settings({}, {})
    assert {name: setting.value for name, setting in settings.chosen.items()} == {
        item.name: item.default for item in OPTIONS
    }
    assert [settings.make(config) for config in CONFIGS] == [config() for config in CONFIGS]
    assert all(checked(config()) for config in CONFIGS)


def test_names_are_unique():
    """One flat file and one flat set of variables serve all dataclasses."""
    assert len({item.name for item in OPTIONS}) == len(OPTIONS)
    assert not any(item.variable.endswith(KUBERNETES) for item in OPTIONS)


@each_option
def test_every_option_explains_itself(item):
    assert item.help
    assert item.kind in (bool, int, float, str)
    if item.kind in (int, float):
        assert item.minimum is not None
    if item.kind is float:
        assert item.maximum is not None  # a maximum also excludes nan and inf


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("INSECURE", "1", True),
        ("INSECURE", "0", False),
        ("INSECURE", "true", True),
        ("INSECURE", "false", False),
        ("CLIENT_TIMEOUT", "7", 7.0),
        ("CLIENT_TIMEOUT", "1e1", 10.0),
        ("MODEL", "true", "true"),
        ("KV_CACHE_SIZE", "7", 7),
        ("KV_CACHE_SIZE", "512KiB", 512 * 2**10),
        ("KV_CACHE_SIZE", "512MiB", 512 * 2**20),
        ("KV_CACHE_SIZE", "4GiB", 4 * 2**30),
        ("KV_CACHE_SIZE", "1TiB", 2**40),
    ],
)
def test_how_the_environment_writes_values(name, text, expected):
    got = read_settings({}, {f"GPUSCORE_{name}": text}).chosen[name.lower()].value
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize("name", [item.name for item in OPTIONS] + ["config", "api_key"])
def test_an_empty_variable_is_an_unset_one(name):
    settings = read_settings({}, {"GPUSCORE_" + name.upper(): ""})
    assert settings == read_settings({}, {})


def test_a_size_may_be_text_everywhere(tmp_path):
    path = tmp_path / "gpuscore.toml"
    for text, expected in (("'4GiB'", 2**32), ("4096", 4096), ("'4096'", 4096)):
        path.write_text(f"kv_cache_size = {text}\n")
        assert read_settings({"config": str(path)}, {}).chosen["kv_cache_size"].value == expected
    assert parsed(["--kv-cache-size", "3MiB"])["kv_cache_size"] == 3 * 2**20
    assert checked(ModelConfig(kv_cache_size="3MiB")).kv_cache_size == 3 * 2**20
    with pytest.raises(ConfigError, match='kv_cache_size must be a size .*, got "3MB"'):
        checked(ModelConfig(kv_cache_size="3MB"))


def test_the_example_of_the_documentation(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "configure.md"
    text = page.read_text(encoding="utf-8")
    path = tmp_path / "gpuscore.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    chosen = read_settings({"config": str(path)}, {}).chosen
    assert [name for name, setting in chosen.items() if setting.source == f"file {path}"] == [
        "model",
        "max_batch_tokens",
        "port",
        "request_timeout",
    ]


def test_the_flag_chooses_another_file_than_the_environment(tmp_path):
    (tmp_path / "a.toml").write_text("port = 1\n")
    (tmp_path / "b.toml").write_text("max_items = 2\n")
    settings = read_settings(
        {"config": str(tmp_path / "a.toml")}, {"GPUSCORE_CONFIG": str(tmp_path / "b.toml")}
    )
    assert settings.chosen["port"].source == f"file {tmp_path / 'a.toml'}"
    assert settings.chosen["max_items"].source == "default"


def test_the_library_reads_no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUSCORE_MODEL", "/no/such")
    monkeypatch.setenv("GPUSCORE_CONFIG", "/no/such")
    monkeypatch.setenv("GPUSCORE_PROT", "1")
    with Scorer(max_batch_tokens=64, threads=1) as scorer:
        assert scorer.score([5], [[6]], label_token_ids=[7]).scores.shape == (1, 1)
    assert ModelConfig() == ModelConfig("demo")
    assert EngineConfig().max_queued_requests == 1024
