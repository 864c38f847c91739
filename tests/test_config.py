"""Promise: a value may be set in three places, the strongest wins, and no mistake passes."""

import argparse
import itertools
import json
import os
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from gpuscore import Scorer
from gpuscore.cli import main
from gpuscore.config import CONFIGS, EngineConfig, FileConfig, ModelConfig, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.flags import add_flags
from gpuscore.options import checked, options
from gpuscore.settings import KUBERNETES, read_settings
from support.serving import COMMAND, serving

OPTIONS = list(options())
SOURCES = ("file", "environment", "command line")  # from the weakest to the strongest
SECRET = "key-that-nobody-may-see"

each_option = pytest.mark.parametrize("item", OPTIONS, ids=lambda item: item.name)


def two_values(item):
    """Two valid values, neither the default, except that a bool has only one such."""
    if item.kind is bool:
        return True, False
    if item.choices:
        return item.choices[-2:]
    if item.kind is str:
        return "first value", "1"
    low = item.minimum or 0
    return (item.kind(low + 7), item.kind(low + 8)) if item.kind is int else (low + 0.5, low + 0.75)


def read(tmp_path, given):
    """Settings from {source: {name: value}}, each source written as a user would."""
    arguments, environment = [], {"HOME": "/", "PATH": "/bin"}
    if "file" in given:
        path = tmp_path / "gpuscore.toml"
        path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in given["file"].items()))
        environment["GPUSCORE_CONFIG"] = str(path)
    for name, value in given.get("environment", {}).items():
        environment["GPUSCORE_" + name.upper()] = as_text(value)
    for name, value in given.get("command line", {}).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-"))
        else:
            arguments += [as_text(value)] if name == "model" else [flag, as_text(value)]
    return read_settings(parsed(arguments), environment)


def parsed(arguments):
    parser = argparse.ArgumentParser()
    add_flags(parser, *CONFIGS, FileConfig)
    return vars(parser.parse_args(arguments))


def as_text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def source_name(source, item, tmp_path):
    names = {"file": f"file {tmp_path / 'gpuscore.toml'}", "environment": f"environment {item}"}
    return names.get(source, source)


@each_option
@pytest.mark.parametrize("source", SOURCES)
def test_every_option_from_every_source(item, source, tmp_path):
    for value in two_values(item):
        settings = read(tmp_path, {source: {item.name: value}})
        got = settings.chosen[item.name]
        assert (got.value, type(got.value)) == (value, type(value))
        assert got.source == source_name(source, "GPUSCORE_" + item.name.upper(), tmp_path)
        others = [one for name, one in settings.chosen.items() if name != item.name]
        assert {one.source for one in others} == {"default"}
        (config,) = [c for c in CONFIGS if item.name in {o.name for o in options(c)}]
        assert getattr(settings.make(config), item.name) == value


@each_option
@pytest.mark.parametrize(("weak", "strong"), list(itertools.combinations(SOURCES, 2)))
def test_the_stronger_source_wins(item, weak, strong, tmp_path):
    for below, above in itertools.permutations(two_values(item)):
        settings = read(tmp_path, {weak: {item.name: below}, strong: {item.name: above}})
        got = settings.chosen[item.name]
        assert got.value == above
        assert got.source == source_name(strong, "GPUSCORE_" + item.name.upper(), tmp_path)


def test_defaults():
    settings = read_settings({}, {})
    assert {name: one.value for name, one in settings.chosen.items()} == {
        item.name: item.default for item in OPTIONS
    }
    assert [settings.make(config) for config in CONFIGS] == [config() for config in CONFIGS]
    assert all(checked(config()) for config in CONFIGS)


def test_names_are_unique():
    """One flat file and one flat set of variables serve all dataclasses."""
    assert len({item.name for item in OPTIONS}) == len(OPTIONS)
    assert not any(KUBERNETES.fullmatch(f"{item.variable}=x") for item in OPTIONS)


@each_option
def test_every_option_explains_itself(item):
    assert item.help
    assert item.kind in (bool, int, float, str)
    if item.kind in (int, float):
        assert item.minimum is not None
    if item.kind is float:
        assert item.maximum is not None  # which also keeps nan and inf away


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
            want = f"{place} must be {item.supported}, got {json.dumps(value)}"
            assert str(error.value) == want


def wrong_values(item):
    if item.choices:
        return ["", "other"]
    values = [item.minimum - 1] if item.minimum else []
    return values + ([item.kind(item.maximum + 1)] if item.maximum is not None else [])


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("INSECURE", "1", True),
        ("INSECURE", "0", False),
        ("INSECURE", "true", True),
        ("INSECURE", "false", False),
        ("BODY_TIMEOUT", "7", 7.0),
        ("BODY_TIMEOUT", "1e1", 10.0),
        ("MODEL", "true", "true"),
        ("KV_CACHE_SIZE", "7", 7),
        ("KV_CACHE_SIZE", "512KiB", 512 * 2**10),
        ("KV_CACHE_SIZE", "512MiB", 512 * 2**20),
        ("KV_CACHE_SIZE", "4GiB", 4 * 2**30),
        ("KV_CACHE_SIZE", "1TiB", 2**40),
    ],
)
def test_how_the_environment_writes_values(name, text, want):
    got = read_settings({}, {f"GPUSCORE_{name}": text}).chosen[name.lower()].value
    assert (got, type(got)) == (want, type(want))


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("INSECURE", "yes", 'must be true or false, got "yes"'),
        ("INSECURE", "True", 'must be true or false, got "True"'),
        ("PORT", "80.0", 'must be an integer from 0 to 65535, got "80.0"'),
        ("PORT", "8_000", 'must be an integer from 0 to 65535, got "8_000"'),
        ("PORT", " 80", 'must be an integer from 0 to 65535, got " 80"'),
        ("PORT", "٨٠", 'must be an integer from 0 to 65535, got "٨٠"'),
        ("PORT", "true", 'must be an integer from 0 to 65535, got "true"'),
        ("PORT", "9" * 5000, f'got "{"9" * 59}...'),
        ("BODY_TIMEOUT", "10s", 'must be a number from 0.1 to 86400, got "10s"'),
        ("BODY_TIMEOUT", "nan", "must be a number from 0.1 to 86400, got nan"),
        ("BODY_TIMEOUT", "inf", "must be a number from 0.1 to 86400, got inf"),
        *(
            (
                "KV_CACHE_SIZE",
                text,
                f"must be a size such as 512MiB or 4GiB, in bytes at least 1, {got}",
            )
            for text, got in (
                ("4GB", 'got "4GB"'),
                ("4gib", 'got "4gib"'),
                ("4 GiB", 'got "4 GiB"'),
                ("1.5GiB", 'got "1.5GiB"'),
                ("-1GiB", 'got "-1GiB"'),
                ("GiB", 'got "GiB"'),
                ("٤GiB", 'got "٤GiB"'),
                ("0MiB", "got 0"),
                ("9" * 5000, f'got "{"9" * 59}...'),
            )
        ),
        ("MEMORY_FRACTION", "1.1", "must be a number from 0.05 to 1.0, got 1.1"),
        ("DEVICE", "tpu", 'must be one of auto, cpu, cuda, got "tpu"'),
        ("MODEL", "a\nb" * 99, None),
    ],
)
def test_a_wrong_variable(name, text, want):
    if want is None:  # any text may be a model's name; what it is not is for others to say
        assert read_settings({}, {f"GPUSCORE_{name}": text}).chosen["model"].value == text
        return
    with pytest.raises(ConfigError) as error:
        read_settings({}, {f"GPUSCORE_{name}": text})
    assert str(error.value).startswith(f"GPUSCORE_{name} must be ")
    assert want in str(error.value)


@pytest.mark.parametrize("name", [item.name for item in OPTIONS] + ["config", "api_key"])
def test_an_empty_variable_is_an_unset_one(name):
    settings = read_settings({}, {"GPUSCORE_" + name.upper(): ""})
    assert settings == read_settings({}, {})


def test_a_size_may_be_text_everywhere(tmp_path):
    path = tmp_path / "gpuscore.toml"
    for text, want in (("'4GiB'", 2**32), ("4096", 4096), ("'4096'", 4096)):
        path.write_text(f"kv_cache_size = {text}\n")
        assert read_settings({"config": str(path)}, {}).chosen["kv_cache_size"].value == want
    assert parsed(["--kv-cache-size", "3MiB"])["kv_cache_size"] == 3 * 2**20
    assert checked(ModelConfig(kv_cache_size="3MiB")).kv_cache_size == 3 * 2**20
    with pytest.raises(ConfigError, match='kv_cache_size must be a size .*, got "3MB"'):
        checked(ModelConfig(kv_cache_size="3MB"))


def test_an_empty_string_is_no_value_elsewhere(tmp_path):
    for name in ("model", "host", "served_model_name"):
        for source in ("file", "command line"):
            with pytest.raises(ConfigError, match='must be a non-empty string, got ""'):
                read(tmp_path, {source: {name: ""}})
    with pytest.raises(ConfigError, match="--config must be a non-empty string"):
        read_settings({"config": ""}, {})


@pytest.mark.parametrize(
    ("variable", "want"),
    [
        ("GPUSCORE_PROT", "the closest is GPUSCORE_PORT; `gpuscore serve --help` shows all"),
        ("GPUSCORE_MAX_BATCH_TOKEN", "the closest is GPUSCORE_MAX_BATCH_TOKENS;"),
        ("GPUSCORE_MAX-ITEMS", "the closest is GPUSCORE_MAX_ITEMS;"),
        ("GPUSCORE_port", "the closest is GPUSCORE_PORT;"),
        ("GPUSCORE_APIKEY", "the closest is GPUSCORE_API_KEY;"),
        ("GPUSCORE_CONFIGS", "the closest is GPUSCORE_CONFIG;"),
        ("GPUSCORE_XYZZY", "GPUSCORE_XYZZY; `gpuscore serve --help` shows all"),
        ("GPUSCORE_", "GPUSCORE_; `gpuscore serve --help` shows all"),
    ],
)
@pytest.mark.parametrize("value", [SECRET, ""])
def test_an_unknown_variable(variable, value, want):
    with pytest.raises(ConfigError) as error:
        read_settings({}, {variable: value})
    assert str(error.value).startswith(f"there is no environment variable {variable};")
    assert want in str(error.value)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORT", "tcp://10.0.0.1:8000"),
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT", "8000"),
        ("SERVICE_PORT_HTTP", "8000"),
        ("PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("PORT_8000_TCP_PROTO", "tcp"),
        ("PORT_8000_TCP_PORT", "8000"),
        ("PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("PORT_53_UDP_ADDR", "10.0.0.1"),
        ("CPU_SERVICE_HOST", "10.0.0.1"),  # of a Service called gpuscore-cpu
        ("CPU_PORT", "tcp://10.0.0.1:8000"),
    ],
)
def test_what_kubernetes_injects_is_recognised(variable, value):
    """Named as such before anything else that is wrong, GPUSCORE_PORT for a port included."""
    environment = {f"GPUSCORE_{variable}": value, "GPUSCORE_AAA": "1", "GPUSCORE_HOST": "0.0.0.0"}
    with pytest.raises(ConfigError, match="set by Kubernetes") as error:
        read_settings({}, environment)
    assert f"GPUSCORE_{variable}={value}" in str(error.value)
    assert "enableServiceLinks: false" in str(error.value)
    assert "rename the Service" in str(error.value)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("prot = 1", 'there is no key "prot"; the closest is port; `gpuscore serve --help`'),
        ("max-items = 1", "the closest is max_items;"),
        ("Port = 1", "the closest is port;"),
        ("GPUSCORE_PORT = 1", "the closest is port;"),
        ("xyzzy = 1", 'there is no key "xyzzy"; `gpuscore serve --help` shows all'),
        ('"a\\nb" = 1', r'there is no key "a\nb"; '),
        ("config = 'other.toml'", 'there is no key "config"; '),
        (f"apikey = '{SECRET}'", 'there is no key "apikey"; '),
        (f"api_key = '{SECRET}'", "api_key is a secret and must not be in this file: set GPUSCORE"),
        (f"api_key_file = ['{SECRET}']", "api_key_file must be a non-empty string, got an array"),
        (f"api_key = '{SECRET}'\napi_key = '{SECRET}'", "api_key is set a second time in line 2"),
        ("[server]\nport = 1", '"server" is a table; supported: one line per option'),
        ("server.port = 1", '"server" is a table; '),
        (
            "port = 1\nhost = '::1'\nport = 1",
            "port is set a second time in line 3; supported:",
        ),
        ("port = '8000'", 'port must be an integer from 0 to 65535, got "8000"'),
        ("port = 8000.0", "port must be an integer from 0 to 65535, got 8000.0"),
        ("port = true", "port must be an integer from 0 to 65535, got true"),
        ("port = 1979-05-27", "port must be an integer from 0 to 65535, got 1979-05-27"),
        ("max_items = 0", "max_items must be an integer of at least 1, got 0"),
        ("insecure = 1", "insecure must be true or false, got 1"),
        ("insecure = 'true'", 'insecure must be true or false, got "true"'),
        ("body_timeout = true", "body_timeout must be a number from 0.1 to 86400, got true"),
        ("body_timeout = nan", "body_timeout must be a number from 0.1 to 86400, got nan"),
        (f"body_timeout = 1{'0' * 400}", "must be a number from 0.1 to 86400, got 1000"),
        ("kv_cache_size = '4GB'", "kv_cache_size must be a size such as 512MiB or 4GiB, in bytes"),
        ("kv_cache_size = 4.0", "in bytes at least 1, got 4.0"),
        ("model = 7", "model must be a non-empty string, got 7"),
        ("device = 'gpu'", 'device must be one of auto, cpu, cuda, got "gpu"'),
        ("port = ", "Invalid value (at line 1"),
        ("port 8000", "(at line 1"),
        ("max_items = " + "[" * 9999, "recursion"),
        ("port = " + "9" * 5000, "4300"),
        (b"\xff", "can't decode"),
    ],
)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_wrong_file(text, want, end, tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_bytes(text if isinstance(text, bytes) else (text + end).encode())
    with pytest.raises(ConfigError) as error:
        read_settings({"config": str(path)}, {})
    message = str(error.value)
    assert str(path) in message
    assert want in message
    assert SECRET not in message
    assert "\n" not in message
    assert len(message) < 300


def test_an_integer_is_fine_for_a_number(tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_text("\r\n# seconds\r\nbody_timeout = 7\r\n")
    assert read_settings({"config": str(path)}, {}).make(ServerConfig).body_timeout == 7


def test_the_example_of_the_readme(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "gpuscore.toml"
    path.write_text(readme.split("```toml\n")[1].split("```")[0])
    chosen = read_settings({"config": str(path)}, {}).chosen
    assert [name for name, one in chosen.items() if one.source == f"file {path}"] == [
        "model",
        "max_batch_tokens",
        "port",
        "request_timeout",
    ]


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        for flags, environment in (
            ({"config": str(path)}, {}),
            ({}, {"GPUSCORE_CONFIG": str(path)}),
        ):
            with pytest.raises(ConfigError, match=f"configuration file {path}: "):
                read_settings(flags, environment)


def test_the_flag_chooses_another_file_than_the_environment(tmp_path):
    (tmp_path / "a.toml").write_text("port = 1\n")
    (tmp_path / "b.toml").write_text("max_items = 2\n")
    settings = read_settings(
        {"config": str(tmp_path / "a.toml")}, {"GPUSCORE_CONFIG": str(tmp_path / "b.toml")}
    )
    assert settings.chosen["port"].source == f"file {tmp_path / 'a.toml'}"
    assert settings.chosen["max_items"].source == "default"


def test_an_overridden_source_is_checked_all_the_same(tmp_path):
    wrong = {"file": {"port": 70000}, "environment": {"port": 70000}}
    for source in wrong:
        with pytest.raises(ConfigError, match="got 70000"):
            read(tmp_path, {source: wrong[source], "command line": {"port": 1}})


@pytest.mark.parametrize("options", [{"threads": "1"}, {"threads": 1.0}, {"threads": True}])
def test_the_library_coerces_nothing(options):
    with pytest.raises(ConfigError, match="threads must be an integer from 1 to 1024, got "):
        Scorer("demo", **options)


def test_the_library_reads_no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUSCORE_MODEL", "/no/such")
    monkeypatch.setenv("GPUSCORE_CONFIG", "/no/such")
    monkeypatch.setenv("GPUSCORE_PROT", "1")
    with Scorer() as scorer:
        assert scorer.score([5], [[6]], label_token_ids=[7]).scores.shape == (1, 1)
    assert ModelConfig() == ModelConfig("demo")
    assert EngineConfig().max_queued_requests == 1024


@pytest.mark.parametrize("columns", ["80", "100"])
@pytest.mark.parametrize("command", ["serve", "score", "info"])
def test_help_is_readable(command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert lines[0].startswith(f"usage: gpuscore {command} [MODEL] ")
    assert not lines[1], "a usage of one line"
    for wanted in ("--max-batch-tokens TOKENS", "GPUSCORE_MAX_BATCH_TOKENS=4096", "--config FILE"):
        assert wanted in text
    assert not any(word in text for word in ("INT", "FLOAT", "STR", "==SUPPRESS==", "None"))
    shown = " ".join(text.split())
    for item in options(*(CONFIGS if command != "score" else (ModelConfig,))):
        assert (item.metavar if item.positional else item.flag) in text
        assert shown.count(item.help) == 1
    if command == "serve":
        for default in ("8000", "127.0.0.1", "10000", "16777216"):
            assert text.count(default) == 1, "a default is shown once"


def gpuscore(*arguments, **environment):
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["serve", "score", "info"])
def test_the_program_refuses_a_wrong_configuration(command, tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_text("prot = 9000\n")
    words = ["--query", "q", "--items", "-", "--labels", "a"] if command == "score" else []
    for arguments, environment, want in (
        (["--config", path], {}, f'{path}: there is no key "prot"; the closest is port;'),
        ([], {"GPUSCORE_MAX_ITEMS": "0"}, "GPUSCORE_MAX_ITEMS must be an integer of at least 1"),
    ):
        done = gpuscore(command, *words, *arguments, **environment)
        assert done.returncode == 78
        assert done.stderr.startswith(f"gpuscore: {want}")
        assert done.stderr.count("\n") == 1
        assert not done.stdout


def table(output):
    """{name: (star, value, source)} of the second section of `gpuscore info`."""
    _, _, section = output.partition("\n\n")
    head, *lines = section.splitlines()
    assert head.split() == ["setting", "value", "source"]
    value, source = head.index("value"), head.index("source")
    return {
        line[2:value].strip(): (line[:2], line[value:source].strip(), line[source:])
        for line in lines
    }


def test_info_shows_where_values_come_from(tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_text("max_batch_tokens = 512\nmax_items = 5\nport = 1\nrequest_timeout = 7.5\n")
    environment = {"GPUSCORE_PORT": "9000", "GPUSCORE_INSECURE": "1", "GPUSCORE_API_KEY": SECRET}
    done = gpuscore("info", "--config", path, "demo", "--host", "::1", **environment)
    assert done.returncode == 0, done.stderr
    assert "one forward pass                    512 tokens" in done.stdout
    rows = table(done.stdout)
    assert list(rows) == [item.name for item in OPTIONS]
    assert {name: row for name, row in rows.items() if row[2] != "default"} == {
        "model": ("* ", "demo", "command line"),
        "max_batch_tokens": ("* ", "512", f"file {path}"),
        "host": ("* ", "::1", "command line"),
        "port": ("* ", "9000", "environment GPUSCORE_PORT"),
        "insecure": ("* ", "true", "environment GPUSCORE_INSECURE"),
        "request_timeout": ("* ", "7.5", f"file {path}"),
        "max_items": ("* ", "5", f"file {path}"),
    }
    assert rows["max_labels"] == ("  ", "128", "default")
    assert rows["body_timeout"] == ("  ", "30", "default")
    assert rows["threads"] == ("  ", "not set", "default")
    assert SECRET not in done.stdout + done.stderr


def test_info_of_a_model_that_cannot_be_served_still_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("GPUSCORE_MODEL", "/no/such")
    assert main(["info"]) == 78
    shown = capsys.readouterr()
    assert "environment GPUSCORE_MODEL" in shown.out
    assert shown.err == "gpuscore: model directory /no/such does not exist\n"


def test_score_takes_its_model_from_the_environment(tmp_path):
    """The file holds keys of the server, which score checks and does not use."""
    path = tmp_path / "gpuscore.toml"
    path.write_text('model = "/no/such"\nport = 80\nthreads = 1\n')
    words = ["score", "--query", "q", "--items", "-", "--labels", "yes", "--json"]
    done = gpuscore(*words, GPUSCORE_CONFIG=str(path), GPUSCORE_MODEL="demo")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert gpuscore(*words, GPUSCORE_CONFIG=str(path)).returncode == 78


def test_serve_binds_the_port_of_the_environment(tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_text('port = 1\nserved_model_name = "from-the-file"\nthreads = 1\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"GPUSCORE_PORT": str(port), "GPUSCORE_MAX_ITEMS": "1"}
    with serving("demo", "--config", str(path), port=(), environment=environment) as server:
        assert server.address == ("127.0.0.1", port)
        models = httpx.get(f"{server.url}/v1/models").json()
        assert models["data"][0]["id"] == "from-the-file"
        body = {"query": "q", "items": ["a", "b"], "labels": ["yes"]}
        reply = httpx.post(f"{server.url}/v1/score", json=body)
        assert reply.json()["error"]["code"] == "too_many_items"


@pytest.mark.parametrize(
    "words",
    [["serve", "--api-key", SECRET], ["info", f"--api-key={SECRET}"], ["--api-key", SECRET]],
)
def test_a_key_on_the_command_line_is_refused_and_not_repeated(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "set GPUSCORE_API_KEY or --api-key-file" in error
    assert SECRET not in error
