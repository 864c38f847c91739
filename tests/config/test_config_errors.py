"""Promise: every mistake in a configuration is refused, and the error names its place."""

import json

import pytest

from gpuscore import Scorer
from gpuscore.config.sources import read_settings
from gpuscore.errors import ConfigError
from support.settings import SECRET, SOURCES, each_option, read


@each_option
def test_what_is_out_of_range_is_refused_wherever_it_is(item, tmp_path):
    for value in wrong_values(item):
        for source in SOURCES[:1] if item.choices else SOURCES:
            with pytest.raises(ConfigError) as error:
                read(tmp_path, {source: {item.name: value}})
            place = {
                "file": f"{tmp_path / 'gpuscore.toml'}: {item.name}",
                "environment": f"GPUSCORE_{item.name.upper()}",
                "command line": item.flag,
            }[source]
            expected = f"{place} must be {item.supported}, got {json.dumps(value)}"
            assert str(error.value) == expected


def wrong_values(item):
    if item.choices:
        return ["", "other"]
    values = [item.minimum - 1] if item.minimum else []
    return values + ([item.kind(item.maximum + 1)] if item.maximum is not None else [])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("INSECURE", "True", 'must be true or false, got "True"'),
        ("PORT", "8_000", 'must be an integer from 0 to 65535, got "8_000"'),
        ("PORT", " 80", 'must be an integer from 0 to 65535, got " 80"'),
        ("PORT", "٨٠", 'must be an integer from 0 to 65535, got "٨٠"'),
        ("PORT", "true", 'must be an integer from 0 to 65535, got "true"'),
        ("PORT", "9" * 5000, f'got "{"9" * 59}...'),
        ("CLIENT_TIMEOUT", "10s", 'must be a number from 0.1 to 86400, got "10s"'),
        ("CLIENT_TIMEOUT", "nan", "must be a number from 0.1 to 86400, got nan"),
        *(
            (
                "KV_CACHE_SIZE",
                text,
                f"must be a size such as 512MiB or 4GiB, in bytes at least 1, {got}",
            )
            for text, got in (
                ("4GB", 'got "4GB"'),
                ("4 GiB", 'got "4 GiB"'),
                ("1.5GiB", 'got "1.5GiB"'),
                ("GiB", 'got "GiB"'),
                ("٤GiB", 'got "٤GiB"'),
                ("9" * 5000, f'got "{"9" * 59}...'),
            )
        ),
        ("MODEL", "a\nb" * 99, None),
    ],
)
def test_a_wrong_variable(name, text, expected):
    if expected is None:  # any text may name a model; loading decides whether there is one
        assert read_settings({}, {f"GPUSCORE_{name}": text}).chosen["model"].value == text
        return
    with pytest.raises(ConfigError) as error:
        read_settings({}, {f"GPUSCORE_{name}": text})
    assert str(error.value).startswith(f"GPUSCORE_{name} must be ")
    assert expected in str(error.value)


def test_an_empty_string_is_no_value_elsewhere(tmp_path):
    for name in ("model", "host", "api_key_file"):
        for source in ("file", "command line"):
            with pytest.raises(ConfigError, match='must be a non-empty string, got ""'):
                read(tmp_path, {source: {name: ""}})
    with pytest.raises(ConfigError, match="--config must be a non-empty string"):
        read_settings({"config": ""}, {})


@pytest.mark.parametrize("variable", ["GPUSCORE_PROT", "GPUSCORE_port", "GPUSCORE_"])
@pytest.mark.parametrize("value", [SECRET, ""])
def test_an_unknown_variable(variable, value):
    with pytest.raises(ConfigError) as error:
        read_settings({}, {variable: value})
    shows = "`gpuscore serve --help-all` shows all"
    assert str(error.value) == f"there is no environment variable {variable}; {shows}"


@pytest.mark.parametrize("service", ["", "CPU_"])
def test_what_kubernetes_injects_is_recognised(service):
    """Such variables are reported before any other mistake, even a GPUSCORE_PORT that is no
    number. The second Service is called gpuscore-cpu."""
    injected = {
        "PORT": "tcp://10.0.0.1:8000",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    environment = {f"GPUSCORE_{service}{name}": value for name, value in injected.items()}
    with pytest.raises(ConfigError, match="set by Kubernetes") as error:
        read_settings({}, {"GPUSCORE_AAA": "1", **environment, "GPUSCORE_HOST": "0.0.0.0"})
    assert f"GPUSCORE_{service}SERVICE_HOST=10.0.0.1" in str(error.value)
    assert "enableServiceLinks: false" in str(error.value)
    assert "rename the Service" in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot = 1", 'there is no key "prot"; `gpuscore serve --help-all` shows'),
        ('"a\\nb" = 1', r'there is no key "a\nb"; '),
        ("config = 'other.toml'", 'there is no key "config"; '),
        (f"apikey = '{SECRET}'", 'there is no key "apikey"; '),
        (f"api_key = '{SECRET}'", "api_key is a secret and must not be in this file: set GPUSCORE"),
        (f"api_key_file = ['{SECRET}']", "api_key_file must be a non-empty string, got an array"),
        (f"api_key = '{SECRET}'\napi_key = '{SECRET}'", "Cannot overwrite a value (at line 2,"),
        ("[server]\nport = 1", 'there is no key "server"; '),
        ("port = '8000'", 'port must be an integer from 0 to 65535, got "8000"'),
        ("port = 8000.0", "port must be an integer from 0 to 65535, got 8000.0"),
        ("port = true", "port must be an integer from 0 to 65535, got true"),
        ("port = 1979-05-27", "port must be an integer from 0 to 65535, got 1979-05-27"),
        ("insecure = 1", "insecure must be true or false, got 1"),
        ("client_timeout = true", "client_timeout must be a number from 0.1 to 86400, got true"),
        (f"client_timeout = 1{'0' * 400}", "must be a number from 0.1 to 86400, got 1000"),
        ("kv_cache_size = 4.0", "in bytes at least 1, got 4.0"),
        ("model = 7", "model must be a non-empty string, got 7"),
        ("port = ", "Invalid value (at line 1"),
        ("port 8000", "(at line 1"),
        ("max_items = " + "[" * 9999, "recursion"),
        ("port = " + "9" * 5000, "4300"),
        (b"\xff", "can't decode"),
    ],
)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_wrong_file(text, expected, end, tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_bytes(text if isinstance(text, bytes) else (text + end).encode())
    with pytest.raises(ConfigError) as error:
        read_settings({"config": str(path)}, {})
    message = str(error.value)
    assert str(path) in message
    assert expected in message
    assert SECRET not in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        for flags, environment in (
            ({"config": str(path)}, {}),
            ({}, {"GPUSCORE_CONFIG": str(path)}),
        ):
            with pytest.raises(ConfigError, match=f"configuration file {path}: "):
                read_settings(flags, environment)


def test_an_overridden_source_is_checked_all_the_same(tmp_path):
    wrong = {"file": {"port": 70000}, "environment": {"port": 70000}}
    for source in wrong:
        with pytest.raises(ConfigError, match="got 70000"):
            read(tmp_path, {source: wrong[source], "command line": {"port": 1}})


@pytest.mark.parametrize("options", [{"threads": "1"}, {"threads": 1.0}, {"threads": True}])
def test_the_library_coerces_nothing(options):
    with pytest.raises(ConfigError, match="threads must be an integer from 1 to 1024, got "):
        Scorer("demo", **options)
