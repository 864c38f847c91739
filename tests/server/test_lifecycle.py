"""Promise: probes tell the truth, a failed start prints one sentence, and a stop loses no
request."""

import re
import shutil
import signal

import httpx
import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.served import ServedModel
from gpuscore.errors import ConfigError
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.run import serve
from support.serving import serving, stops_at_once


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


def test_a_port_in_use(client):
    config = ServerConfig(port=client.base_url.port)
    with pytest.raises(
        ConfigError, match="cannot bind --host 127.0.0.1 --port .*in use.*; choose .* PORT="
    ):
        serve([(ServedModel("m"), pytest.fail)], config, ApiKeys([]), announce=pytest.fail)


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
