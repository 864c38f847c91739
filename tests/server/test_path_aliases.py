"""Promise: a further path of a route has the route's answers, limits, keys, errors and metrics; one
that clashes, or whose route may have none, ends the start."""

import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.served import ServedModel
from gpuscore.errors import ConfigError
from gpuscore.server.api.app import create_app
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.service import ScoringService
from support.connections import check_error, connected, same_answer
from support.serving import SMALL, serving

RERANK = {"query": "a blue chair", "documents": ["A red lamp.", "A chair in blue.", "A scarf."]}
TEI = {"query": "a blue chair", "texts": ["A red lamp."], "raw_scores": 3}
FLAGS = ("--path-alias", "/ping=/ready", "--path-alias", "/v1/m:predict=/rerank")
ALIASES = {"/ping": "/ready", "/v1/m:predict": "/rerank"}


@pytest.fixture(scope="module")
def client():
    limits = ("--max-items", "2", "--max-body-bytes", "4096")
    started = serving("demo", *SMALL, *FLAGS, *limits, environment={"GPUSCORE_API_KEY": "k"})
    with started as server, connected(server, "k") as opened:
        yield opened


def test_a_further_path_answers_as_its_route(client):
    body = RERANK | {"documents": RERANK["documents"][:2]}
    for path in ("/v1/m:predict", "/v1/%6d:predict?x=1"):
        same_answer(client.post(path, json=body).json(), client.post("/rerank", json=body).json())
    assert client.get("/ping").json() == client.get("/ready").json() == {"status": "ready"}
    assert client.head("/ping").status_code == 200
    assert client.get("/info").json()["gpuscore"]["path_aliases"] == ALIASES


def test_limits_and_errors_are_the_routes(client):
    pairs = [client.post(path, json=RERANK) for path in ("/v1/m:predict", "/rerank")]
    assert check_error(pairs[0], 400, "too_many_items") == check_error(
        pairs[1], 400, "too_many_items"
    )
    pairs = [client.post(path, json=TEI) for path in ("/v1/m:predict", "/rerank")]
    assert pairs[0].json() == pairs[1].json()
    assert set(pairs[0].json()) == {"error", "error_type"}
    assert client.post("/v1/m:predict", content=b"{}").status_code == 415
    assert client.post("/v1/m:predict", json={"query": "x" * 5000}).status_code == 413
    assert client.get("/v1/m:predict").headers["allow"] == "POST"
    assert client.post("/ping").status_code == 405


def test_keys_are_the_routes(client):
    stranger = {"Authorization": "Bearer other"}
    check_error(client.post("/v1/m:predict", json=RERANK, headers=stranger), 401, "invalid_api_key")
    assert client.get("/ping", headers=stranger).status_code == 200


def test_metrics_have_the_routes_name(client):
    client.get("/ping")
    text = client.get("/metrics").text
    assert 'route="/ready"' in text
    assert not [alias for alias in ALIASES if f'route="{alias}"' in text]


def test_the_document_has_both_paths(client):
    paths = client.get("/openapi.json").json()["paths"]
    ids = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(set(ids)) == len(ids)
    for alias, route in ALIASES.items():
        for method, operation in paths[route].items():
            own = {"tags": ["Aliases"], "operationId": f"{method} {alias}"}
            assert paths[alias][method] == operation | own


def test_without_the_setting_there_is_no_such_path(demo):
    check_error(demo.get("/ping"), 404, "not_found")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/ping", "must be PATH=ROUTE, such as /ping=/ready"),
        ("ping=/ready", "must be PATH=ROUTE"),
        ("/ping=", "must be PATH=ROUTE"),
        ("/a?b=/ready", "must be PATH=ROUTE"),
        ("/%70ing=/ready", "must be PATH=ROUTE"),
        ("/a b=/ready", "must be PATH=ROUTE"),
        ("/ping=/ready,/ping=/health", "/ping is a path of the server already"),
        ("/ping=/metrics", "ROUTE is one of /v1/score, "),
        ("/models=/v1/models", "ROUTE is one of"),
        ("/chat=/v1/chat/completions", "ROUTE is one of"),
        ("/a=/ping,/ping=/ready", "ROUTE is one of"),
        ("/ping=/READY", "ROUTE is one of"),
        ("/ping=/ready=", "ROUTE is one of"),
        ("/ping=/ready,", "must be PATH=ROUTE"),
    ],
)
def test_what_is_wrong_is_refused(text, said):
    with pytest.raises(ConfigError, match=f"--path-alias .*{said}"):
        read_aliases(ServerConfig(path_aliases=text))


def test_every_route_of_the_server_is_taken():
    app = create_app(ScoringService([ServedModel("m")]), ServerConfig(), ApiKeys([]))
    taken = app.routes
    assert len(taken) > 30
    for path in taken:
        with pytest.raises(ConfigError, match="is a path of the server already"):
            read_aliases(ServerConfig(path_aliases=f"{path}=/ready"))


def test_a_clash_ends_the_start(tmp_path):
    variables = {"GPUSCORE_PATH_ALIASES": "/ping=/ready,/v1/score=/rerank"}
    started = serving("demo", wait=False, environment=variables, log=tmp_path / "log")
    with started as server:
        assert server.process.wait(timeout=60) == 78
    said = (tmp_path / "log").read_text()
    assert "--path-alias /v1/score=/rerank: /v1/score is a path of the server already" in said
