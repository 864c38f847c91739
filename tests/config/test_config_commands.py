"""Promise: the program shows where its settings come from, and refuses those it cannot use."""

import os
import re
import socket
import subprocess

import httpx
import pytest

from gpuscore.commands.cli import main
from gpuscore.config import CONFIGS, ModelConfig
from gpuscore.config.options import options
from support.programs import COMMAND, run
from support.serving import serving
from support.settings import OPTIONS, SECRET, SOURCES


@pytest.mark.parametrize("columns", ["80", "100"])
@pytest.mark.parametrize("command", ["serve", "info", "parity run", "parity record"])
def test_help_is_readable(command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main([*command.split(), "--help-all"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert lines[0].startswith(f"usage: gpuscore {command} [MODEL] ")
    assert not lines[1], "a usage of one line"
    for wanted in ("--max-batch-tokens TOKENS", "GPUSCORE_MAX_BATCH_TOKENS=4096", "--config FILE"):
        assert wanted in text
    assert not re.search(r"\b(INT|FLOAT|STR|SUPPRESS|None)\b", text)
    shown = " ".join(text.split())
    for item in options(*(CONFIGS if command in ("serve", "info") else (ModelConfig,))):
        assert item.flag in text
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


@pytest.mark.parametrize("command", ["serve", "info"])
def test_the_program_refuses_a_wrong_configuration(command, tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_text("prot = 9000\n")
    for arguments, environment, expected in (
        (["--config", path], {}, f'{path}: there is no key "prot"; `gpuscore'),
        ([], {"GPUSCORE_MAX_ITEMS": "0"}, "GPUSCORE_MAX_ITEMS must be an integer of at least 1"),
    ):
        done = gpuscore(command, *arguments, **environment)
        assert done.returncode == 78
        assert done.stderr.startswith(f"gpuscore: {expected}")
        assert done.stderr.count("\n") == 1
        assert not done.stdout


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("host", "0.0.0.0", "--host 0.0.0.0 is reachable"),
        ("api_key_file", "/no/such", "--api-key-file /no/such: "),
        ("model", "not a name!", "MODEL not a name! is neither a directory"),
    ],
)
def test_an_error_found_after_reading_the_settings_is_told_from_every_source(
    name, value, expected, source, tmp_path, monkeypatch, capsys
):
    (item,) = [item for item in options(*CONFIGS) if item.name == name]
    arguments = []
    if source == "file":
        path = tmp_path / "gpuscore.toml"
        path.write_text(f'{name} = "{value}"\n')
        arguments = ["--config", str(path)]
    elif source == "environment":
        monkeypatch.setenv(item.variable, value)
    else:
        arguments = [item.flag, value]
    assert main(["serve", *arguments]) == 78
    assert capsys.readouterr().err.startswith(f"gpuscore: {expected}")


def test_an_error_of_the_engines_process_is_one_sentence():
    done = run("serve", GPUSCORE_KV_CACHE_SIZE="1", GPUSCORE_PORT="0")
    assert done.returncode == 78
    assert done.stderr.startswith("gpuscore: ")
    assert done.stderr.count("\n") == 1, "one sentence, no traceback"
    assert "lower --max-model-len or raise --kv-cache-size" in done.stderr


def table(output):
    """Return {name: (star, value, source)} from the second section of `gpuscore info`."""
    _, _, section = output.partition("\n\n")
    head, *lines = section.splitlines()
    assert head.split() == ["setting", "value", "source"]
    value, source = head.index("value"), head.index("source")
    return {
        line[2:value].strip(): (line[:2], line[value:source].strip(), line[source:])
        for line in lines
    }


def test_info_shows_where_values_come_from(tmp_path, monkeypatch, capsys):
    path = tmp_path / "gpuscore.toml"
    path.write_text("max_batch_tokens = 512\nmax_items = 5\nport = 1\nrequest_timeout = 7.5\n")
    for name, value in (("PORT", "9000"), ("INSECURE", "1"), ("API_KEY", SECRET)):
        monkeypatch.setenv(f"GPUSCORE_{name}", value)
    code = main(["info", "--config", str(path), "demo", "--host", "::1"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "one forward pass                    512 tokens" in shown.out
    rows = table(shown.out)
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
    assert rows["client_timeout"] == ("  ", "30", "default")
    assert rows["threads"] == ("  ", "not set", "default")
    assert SECRET not in shown.out + shown.err


def test_info_of_a_model_that_cannot_be_served_still_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("GPUSCORE_MODEL", "/no/such")
    assert main(["info"]) == 78
    shown = capsys.readouterr()
    assert "environment GPUSCORE_MODEL" in shown.out
    assert shown.err == "gpuscore: MODEL /no/such: the directory does not exist\n"


def test_a_model_from_the_environment(tmp_path, monkeypatch, capsys):
    """The file holds keys of the server, which batch checks and does not use."""
    path = tmp_path / "gpuscore.toml"
    path.write_text('model = "/no/such"\nport = 80\nthreads = 1\nmax_batch_tokens = 512\n')
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"item": "a"}\n')
    output = ["--output", str(tmp_path / "scored.jsonl")]
    words = ["batch", "--input", str(rows), *output, "--labels", "yes"]
    monkeypatch.setenv("GPUSCORE_CONFIG", str(path))
    assert main(words) == 78
    assert "/no/such" in capsys.readouterr().err
    done = run(*words, GPUSCORE_MODEL="demo")
    assert done.returncode == 0, done.stderr
    assert "scored.jsonl: 1" in done.stdout


def test_serve_binds_the_port_of_the_environment(tmp_path):
    path = tmp_path / "gpuscore.toml"
    path.write_text('port = 1\nmodel = "from-the-file=demo"\nthreads = 1\nmax_batch_tokens = 512\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"GPUSCORE_PORT": str(port), "GPUSCORE_MAX_ITEMS": "1"}
    with serving("--config", str(path), port=(), environment=environment) as server:
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
