"""Promise: probes tell the truth, a failed start prints one sentence, and a stop loses no
request."""

import json
import re
import shutil
import signal
import time

import httpx
import pytest

from gpuscore.commands.cli import main
from gpuscore.config import ServerConfig
from gpuscore.dialects.served import ServedModel
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import ConfigError
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.run import serve
from support.connections import Connection, canary, hold, large_request
from support.programs import run
from support.serving import serving, stops_at_once


def refused_start(*arguments):
    """Return the sentence that a refused start prints."""
    done = run("serve", *arguments, "--threads", "1")
    assert done.returncode == 78, done
    assert done.stderr.startswith("gpuscore: ")
    assert done.stderr.count("\n") == 1, "one sentence, no traceback"
    return done.stderr


def test_probes(client):
    for path in ("/livez", "/health"):
        assert client.get(path).json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}


def test_models(client, model):
    answer = client.get("/v1/models").json()
    (card,) = answer["data"]
    assert answer["object"] == "list"
    assert card == {
        "id": "tiny",
        "object": "model",
        "created": 0,
        "owned_by": "gpuscore",
        "max_model_len": 512,
    }


def test_documentation(client):
    assert "swagger" in client.get("/docs").text.lower()
    api = client.get("/openapi.json").json()
    others = {"/livez", "/health", "/ready", "/v1/models", "/metrics", "/info", "/tokenizer_info"}
    assert set(api["paths"]) == set(DIALECT_OF) | others
    for path in DIALECT_OF:
        content = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert "properties" in content["schema"] or "anyOf" in content["schema"]
        assert content["example"], "a body to try"
        responses = api["paths"][path]["post"]["responses"]
        if not DIALECT_OF[path].answers:  # the route is always refused
            assert "200" not in responses
            assert responses["400"]["$ref"].startswith("#/components/responses/")
            continue
        answer = responses["200"]["content"]["application/json"]
        assert "properties" in answer["schema"] or "anyOf" in answer["schema"]
    content = api["paths"]["/v1/score"]["post"]["requestBody"]["content"]
    properties = content["application/json"]["schema"]["anyOf"][0]["properties"]
    assert {"query", "items", "labels", "label_token_ids", "apply_softmax"} <= set(properties)


def test_a_client_that_leaves_frees_the_engine(model, client):
    before = canary(client)
    with Connection(client) as connection:
        hold(client, connection, large_request(500_000, apply_softmax=True))
    start = time.monotonic()
    assert canary(client) == before
    assert time.monotonic() - start < 5


def test_a_port_in_use(client):
    config = ServerConfig(port=client.base_url.port)
    with pytest.raises(
        ConfigError, match="cannot bind --host 127.0.0.1 --port .*in use.*; name .* PORT="
    ):
        serve([(ServedModel("m"), pytest.fail)], config, ApiKeys([]), announce=pytest.fail)


def test_it_answers_while_loading_and_stops_with_the_reason(model, tmp_path):
    """Weights are read after the port is bound, but damage in them ends the process all the
    same."""
    directory = tmp_path / "damaged"
    shutil.copytree(model[0], directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "cannot be read as safetensors" in refused_start(directory, "--port", 0)


def test_directories_that_are_no_model(model, tmp_path, capsys):
    """The command runs in this process; `serve` prints the same (test_config_commands)."""
    directory = tmp_path / "other"
    shutil.copytree(model[0], directory)
    (directory / "tokenizer.json").write_text("{")
    bert = tmp_path / "bert"
    bert.mkdir()
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    (bert / "config.json").write_text(json.dumps(config))
    for place, reason in (
        (tmp_path, "has no config.json"),
        (bert, "architectures is ['BertModel']; supported: Gemma2ForCausalLM"),
        (directory, "cannot be read as a tokenizer"),
    ):
        assert main(["info", str(place)]) == 78
        error = capsys.readouterr().err
        assert error.startswith("gpuscore: ")
        assert reason in error
        assert error.count("\n") == 1


def test_options_out_of_range(model):
    error = refused_start(model[0], "--max-items", "0")
    assert "--max-items must be an integer of at least 1, got 0" in error
    error = refused_start(model[0], "--client-timeout", "nan")
    assert "--client-timeout must be a number from 0.1 to 86400, got nan" in error


def test_a_model_without_a_tokenizer_takes_ids_and_keys_are_never_printed(model, tmp_path):
    directory, log = tmp_path / "ids-only", tmp_path / "log"
    shutil.copytree(model[0], directory)
    (directory / "tokenizer.json").unlink()
    key, ids = "key-that-nobody-may-see", {"items": [[5], [6]], "label_token_ids": [3]}
    with serving(
        directory, "--threads", "1", environment={"GPUSCORE_API_KEY": key}, log=log
    ) as server:
        for sent, items, status in ((key, [[5]], 200), (key, ["a"], 400), (key + "x", [[5]], 401)):
            headers = {"authorization": f"Bearer {sent}"}
            body = ids | {"items": items}
            reply = httpx.post(f"{server.url}/v1/score", json=body, headers=headers)
            assert reply.status_code == status
            assert key not in reply.text + str(reply.headers)
            if status == 400:
                message = reply.json()["error"]["message"]
                assert message == "this model has no tokenizer: send token ids"
        output = stops_at_once(server, signal.SIGINT)
    _, _, after = output.partition("}'\n")
    assert re.sub("^gpuscore: stopp.*$", "", after, flags=re.M).strip() == "", "no noise"
    assert '"status":401' in log.read_text()
    assert key not in output + log.read_text()
