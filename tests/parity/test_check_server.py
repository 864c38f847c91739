"""Promise: check-server finds nothing wrong with a right server and names what a wrong one does
wrong."""

import numpy as np
import pytest
import torch

from gpuscore.backends.common import plan
from gpuscore.commands.cli import main
from gpuscore.measure.parity.arguments import KINDS
from gpuscore.measure.parity.conformance.check_server import SUITE
from gpuscore.measure.parity.conformance.checks import (
    DEVIATIONS,
    FAILED,
    KNOWN,
    OK,
    SKIPPED,
    run_checks,
)
from gpuscore.measure.parity.conformance.server import PlainClient, Reference, RequestRefused, meet
from support.serving import QUICK, serving
from support.wrong_server import VOCAB, WrongServer, running

TOLERANCE = 1e-5
C14 = {check.id for check in SUITE if check.id.startswith("C14.")}
LOOSE = {"C14.label-boolean", "C14.mixed-types", "C14.softmax-number", "C14.no-tokens"}
# The checks that must fail for each defect of the stub; together they name every check.
NAMES = {
    "another object": {"C1.envelope"},
    "answers are lists": {"C1.envelope", "C1.usage", "C2.items", "C13.no-items"},
    "no usage": {"C1.usage"},
    "rows are sorted": {"C2.items"},
    "columns are in the order of the ids": {"C2.labels"},
    "no softmax": {"C3.sum"},
    "softmax is on": {"C4.default"},
    "log-probabilities": {"C4.range"},
    "a softmax of probabilities": {"C4.renormalised"},
    "probabilities are shared by the labels": {"C5.subset", "C5.counts"},
    "equal labels differ": {"C5.duplicates"},
    "another model": {"C6.text", "C6.ids"},
    "item_first is ignored": {"C7.item_first"},
    "text is tokenised apart": {"C8.text", "C9.text"},
    "items see how many there are": {"C9.ids", "C12.sizes", "C16.counts", "C16.large"},
    "items see the item before": {"C10.same-length", "C10.other-length", "C16.large"},
    "all rows are the first": {"C11.distinct"},
    "equal items differ": {"C11.identical"},
    "concurrent requests mix": {"C12.concurrent"},
    "no items are an error": {"C13.no-items"},
    "an empty item is a delimiter": {"C13.empty-item"},
    "an empty query is a delimiter": {"C13.empty-query"},
    "types are not looked at": LOOSE,
    "labels may be empty": {"C13.empty-labels"},
    "bad bodies are errors of the server": {*C14, "C19.malformed"},
    "bad bodies kill": C14,
    "no words": {*C14, "C13.empty-labels", "C15.negative-label"},
    "labels are not looked at": {"C15.negative-label", "C15.label-beyond"},
    "tokens are not looked at": {"C15.negative-token", "C15.token-beyond"},
    "the last id is refused": {"C15.first-and-last"},
    "many items are refused": {"C16.counts", "C16.large"},
    "long items are cut": {"C16.long-item"},
    "long prompts are cut": {"C16.too-long"},
    "no numbers": {"C16.too-long"},
    "jitter": {"C17.repeat"},
    "warm differs": {"C18.warm"},
    "a query is found by its end": {"C18.changed"},
    "not healthy under load": {"C19.health"},
    "": {"C20.california"},  # the stub says that it is Qwen3-0.6B
}


class BytesTokenizer:
    """A tokenizer for the stub: a text's tokens are its bytes, and a label is one token."""

    def __init__(self, ids):
        self.ids = ids

    @classmethod
    def encode(cls, text, add_special_tokens=True):
        return cls(list(text.encode()) if add_special_tokens else [len(text)])


@pytest.fixture(scope="module")
def stub():
    with running(WrongServer()) as server:
        yield server


@pytest.fixture(scope="module")
def met(stub):
    """The facts that the suite finds out about the stub while it is right."""
    right = WrongServer()

    def probabilities(prompts, labels):
        model = WrongServer(salt=1) if stub.has("another model") else right
        logits = np.stack([model.logits(prompt) for prompt in prompts])
        return (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))[:, labels]

    reference = Reference(BytesTokenizer, probabilities)
    return meet(PlainClient(stub.url, None, 10.0), TOLERANCE, None, reference, seed=0)


@pytest.fixture
def plant(stub):
    """plant("defect", ...) plants defects until the test ends."""
    stub.seen.clear()
    yield stub.defects.update
    stub.defects.clear()
    stub.dead = False


def states(server, ids, known=None):
    chosen = [check for check in SUITE if check.id in ids]
    return {outcome.check.id: outcome.state for outcome in run_checks(chosen, server, known or {})}


def test_facts_are_found_by_asking(met):
    assert (met.vocab, met.vocab_known, met.query_len, met.texts) == (VOCAB, True, 2000, True)


def test_a_right_server_passes(met, plant):
    outcomes = states(met, {check.id for check in SUITE} - {"C20.california"})
    assert set(outcomes.values()) == {OK}


def test_the_suite_is_c1_to_c20():
    numbers = [int(check.id[1:].split(".")[0]) for check in SUITE]
    assert sorted(set(numbers)) == list(range(1, 21))
    assert numbers == sorted(numbers)
    assert len({check.id for check in SUITE}) == len(SUITE)
    assert set().union(*NAMES.values()) == {check.id for check in SUITE}, (
        "each is seen to fail below"
    )
    assert all(set(table) <= {check.id for check in SUITE} for table in DEVIATIONS.values())
    assert set(KINDS) == set(DEVIATIONS), "every kind can be asked for"


@pytest.mark.parametrize("defect", NAMES)
def test_a_defect_is_named(met, plant, defect):
    plant({defect})
    outcomes = states(met, NAMES[defect])
    assert outcomes == dict.fromkeys(NAMES[defect], FAILED)


def test_a_known_deviation_is_no_failure(met, plant):
    plant({"item_first is ignored"})
    assert states(met, {"C7.item_first"}, DEVIATIONS["sglang-mis"]) == {"C7.item_first": KNOWN}
    assert states(met, {"C7.item_first"}, DEVIATIONS["sglang"]) == {"C7.item_first": FAILED}


OWN_LABELS = {"there are default labels"}


def test_default_labels_are_no_failure(met, plant):
    plant(OWN_LABELS)
    assert states(met, {"C14.labels-null", "C19.malformed"}) == {
        "C14.labels-null": OK,
        "C19.malformed": OK,
    }


@pytest.mark.parametrize("defect", ["null is one label", "null is other labels", "no softmax"])
def test_default_labels_that_are_wrong(met, plant, defect):
    plant({*OWN_LABELS, defect})
    assert states(met, {"C14.labels-null"}) == {"C14.labels-null": FAILED}


@pytest.mark.slow  # tests/server/test_conformance.py checks a server of ours in make test
def test_our_demo_server_passes():
    """The demo model's family has default labels."""
    with serving("demo", *QUICK) as server:
        demo = meet(PlainClient(server.url, None, 60.0), TOLERANCE, None, None, seed=0)
        outcomes = states(demo, {check.id for check in SUITE})
    assert set(outcomes.values()) == {OK, SKIPPED}


def test_without_a_reference_some_checks_are_skipped(stub):
    server = meet(PlainClient(stub.url, None, 10.0), TOLERANCE, VOCAB, None, seed=0)
    ids = {"C6.text", "C6.ids", "C8.text"}
    assert states(server, ids) == dict.fromkeys(ids, SKIPPED)


def test_labels_that_are_never_refused(stub, plant):
    """The number of ids stays unknown; the checks at its edge are skipped or fail."""
    plant({"labels are not looked at"})
    server = meet(PlainClient(stub.url, None, 10.0), TOLERANCE, None, None, seed=0)
    assert not server.vocab_known
    expected = {"C15.first-and-last": SKIPPED, "C15.label-beyond": FAILED, "C2.labels": OK}
    assert states(server, set(expected)) == expected


def test_a_server_that_is_not_there():
    with pytest.raises(RequestRefused, match="no answer"):
        meet(PlainClient("http://127.0.0.1:9", None, 1.0), TOLERANCE, None, None, seed=0)


class TestCommand:
    """Checks through the command line. The stub's model name makes C20 fail, so that is
    expected."""

    @pytest.fixture(autouse=True)
    def _only_some(self, monkeypatch):
        chosen = [
            check for check in SUITE if check.id in ("C1.usage", "C7.item_first", "C13.no-items")
        ]
        monkeypatch.setattr("gpuscore.measure.parity.conformance.check_server.SUITE", chosen)

    def run(self, *arguments):
        return main(["parity", "check-server", "--vocab-size", str(VOCAB), *arguments])

    def test_exit_codes_and_names(self, stub, plant, capsys):
        assert self.run(stub.url) == 0
        assert "3 passed, 0 failed" in capsys.readouterr().out
        plant({"no usage"})
        assert self.run(stub.url) == 1
        assert "FAIL  C1.usage: usage counts" in capsys.readouterr().out
        assert self.run(stub.url, "--kind", "sgl-jax") == 0
        shown = capsys.readouterr().out
        assert "known C1.usage" in shown
        assert "usage is null; here: usage is None" in shown
        assert "not seen here: 400 for token ids" in shown, "the table may be out of date"

    def test_two_servers(self, stub, plant, capsys, tmp_path):
        report = tmp_path / "report.html"
        with running(WrongServer()) as same, running(WrongServer(salt=1)) as other:
            assert self.run(stub.url, same.url, "--report", str(report)) == 0
            shown = capsys.readouterr().out
            assert "|d p| max 0.0e+00" in shown
            assert all(f"{server.url}: " in shown for server in (stub, same)), (
                "how fast each one is"
            )
            (row,) = [line for line in shown.splitlines() if line.startswith(f"{same.url}  ")]
            assert "-" not in row.replace("e-", "").split(), "nothing that is not known"
            assert row.split()[-1].isdigit(), "items/s"
            assert self.run(stub.url, other.url) == 1
            shown = capsys.readouterr().out
        assert f"FAIL  {other.url} against {stub.url}, scores" in shown
        assert f"FAIL  {other.url} against {stub.url}, rank" in shown
        page = report.read_text()
        assert page.count("<svg") == 2
        assert page.count("C7.item_first") == 2, "a table for each server"

    def test_the_oracle_leaves_no_device_unused(self, tiny_model, tmp_path, monkeypatch, capsys):
        (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(plan, "NODES", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        directory, _ = tiny_model("qwen3")
        reference = ["--reference", str(directory)]
        assert self.run("http://127.0.0.1:9", *reference) == 78
        assert f"--device auto: this machine has an NVIDIA device, {tmp_path}/nvidia0, that" in (
            capsys.readouterr().err
        )
        assert self.run("http://127.0.0.1:9", *reference, "--device", "cpu") == 78
        shown = capsys.readouterr()
        assert shown.out == "oracle: transformers on cpu\n"
        assert "plain request of token ids gets" in shown.err

    def test_a_key_comes_from_a_file_or_the_environment(self, capsys, tmp_path, monkeypatch):
        path = tmp_path / "keys"
        path.write_text("schlüssel\nanother\n", encoding="utf-8")
        with running(WrongServer()) as server:
            server.key = "schlüssel"
            assert self.run(server.url) == 78
            assert "status 401" in capsys.readouterr().err
            assert self.run(server.url, "--api-key-file", str(path)) == 0
            monkeypatch.setenv("GPUSCORE_API_KEY", "stronger")
            assert self.run(server.url, "--api-key-file", str(path)) == 78
            server.key = "stronger"
            assert self.run(server.url, "--api-key-file", str(path)) == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["127.0.0.1:8000"], "must begin with http"),
            (["http://127.0.0.1:9"], "URL http://127.0.0.1:9: a plain request of token ids gets"),
            (["http://127.0.0.1:9", "--tolerance", "0"], "--tolerance"),
            (["http://127.0.0.1:9", "--vocab-size", "63"], "--vocab-size must be at least 64"),
            (["http://127.0.0.1:9", "--api-key-file", "/no/such"], "--api-key-file /no/such"),
        ],
    )
    def test_what_cannot_be_checked(self, arguments, message, capsys):
        assert self.run(*arguments) == 78
        assert message in capsys.readouterr().err
