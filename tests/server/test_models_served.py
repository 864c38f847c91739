"""Promise: two models with different vocabularies, served together, answer as each does alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuscore.commands.cli import main
from support.connections import connected, same_answer
from support.serving import QUICK, serving
from support.wire import ANSWERED, ids

pytestmark = pytest.mark.slow

# Asked of both; tiny has another vocabulary, and demo alone has a family.
ASKED = {name: ANSWERED[name] for name in ("sequences", "pairs", "rerank", "texts", "tokenize")}
ASKED |= {"echo": ANSWERED["echo of texts"], "ids": ids(3, [3, 17, 399])}


@pytest.fixture(scope="module")
def together(model):
    flags = (f"--model=tiny={model[0]}", "--kv-cache-size=32MiB", *QUICK)
    with serving("--model=demo=demo", *flags) as running, connected(running) as opened:
        yield opened


def test_answers_equal_those_of_each_alone_also_in_parallel(together, client, demo):
    alone = {"demo": demo, "tiny": client}
    wanted = {
        (name, asked): alone[name].post(path, json=body | {"model": name})
        for name in alone
        for asked, (path, body) in ASKED.items()
    }
    assert wanted["demo", "ids"].json()["scores"] != wanted["tiny", "ids"].json()["scores"]
    assert wanted["demo", "tokenize"].json() != wanted["tiny", "tokenize"].json()
    statuses = [wanted[name, "rerank"].status_code for name in ("demo", "tiny")]
    assert statuses == [200, 400]

    def ask(asked):
        name, request = asked
        path, body = ASKED[request]
        return asked, together.post(path, json=body | {"model": name})

    with ThreadPoolExecutor(6) as pool:
        for asked, reply in pool.map(ask, list(wanted) * 3):
            assert reply.status_code == wanted[asked].status_code, (asked, reply.text)
            same_answer(reply.json(), wanted[asked].json())


def test_models_that_do_not_fit_are_refused_before_anything_is_loaded(model, capfd):
    flags = ["--model", "demo=demo", "--model", f"tiny={model[0]}", "--device", "cpu"]
    assert main(["serve", *flags]) == 78
    assert "2 engines on one device need --kv-cache-size" in capfd.readouterr().err
    assert main(["serve", *flags, "--kv-cache-size", "64000GiB"]) == 78
    captured = capfd.readouterr()
    assert "are free: demo 3.9 MiB of weights and 65,536,000.0 MiB of keys" in captured.err
    assert "loading" not in captured.out
    assert main(["info", *flags, "--kv-cache-size", "32MiB"]) == 0
    rows = {line.split()[0]: line for line in capfd.readouterr().out.splitlines() if line}
    assert [rows[name].split()[-2:] for name in ("demo", "tiny")] == [["32.0", "MiB"]] * 2
