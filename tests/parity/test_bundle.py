"""Promise: a bundle reads back as it was written; one that was changed, or that is of another model
or workload, is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gpuscore.commands.cli import main
from gpuscore.errors import ConfigError
from gpuscore.measure import workload as workloads
from gpuscore.measure.bundle import Bundle, read_bundle, write_bundle
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.results import CaseResult, Fingerprint, Measured, sha256
from gpuscore.measure.workload import Case, Workload


def record(model, output, *flags):
    words = ["parity", "record", str(model), "-o", str(output), "--workload", "quick"]
    return main([*words, "--threads", "1", "--max-batch-tokens", "512", *flags])


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory):
    """Bundles of one model: two of one workload in different batches, and one of another."""
    directory = tmp_path_factory.mktemp("bundles")
    model, _ = tiny_model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "MANY", 24)
        patch.setattr(workloads, "QUERIES", 2)
        assert record(model, directory / "a") == 0
        assert record(model, directory / "b", "--max-batch-tokens", "64") == 0
        assert record(model, directory / "c", "--seed", "1") == 0
    return directory / "a", directory / "b", directory / "c"


@pytest.fixture
def made():
    """What scored, in memory."""
    cases = (
        Case("ragged/ü", [5], [[6], []], [[1], [2, 3]]),
        Case("softmax", "q", ["a"], [[1, 2]], ["x", "y"], apply_softmax=True, prompts=[[1, 2]]),
    )
    values = np.array([[-1.5, np.nan], [-2.0, -700.25]])
    return Measured(
        *("torch:float32", "demo", "float32"),
        facts={"versions": {"a": "1"}},
        workload=Workload("made up", 7, 60, 9, cases),
        results={
            "ragged/ü": CaseResult(values, np.array([0.25, 0.125])),
            "softmax": CaseResult(np.array([[-0.1, -2.35]])),
        },
        alone=4e-5,
        digests=Fingerprint("w" * 64, "c" * 64),
    )


def written(path, made):
    write_bundle(path, Bundle({}, (made,)))
    return path


def compare(a, b, *flags):
    return main(["parity", "compare", str(a), str(b), *flags])


def test_it_comes_back_as_it_was_written(made, tmp_path):
    (scored,) = read_bundle(written(tmp_path / "a", made)).servers
    for name, expected in made.results.items():
        np.testing.assert_array_equal(scored.results[name].values, expected.values)
        np.testing.assert_array_equal(scored.results[name].mass, expected.mass)
    assert replace(scored, results={}) == replace(made, results={})
    assert scored.workload.digest == made.workload.digest


def test_equal_bundles_pass(recorded, capsys, tmp_path):
    report = tmp_path / "report.html"
    a, b, _ = recorded
    assert compare(a, b, "--report", str(report)) == 0
    shown = capsys.readouterr().out
    assert f"ok    {b} against {a}, float32: max |d log p|" in shown
    assert f"ok    {a}, packing: alone and among others" in shown
    assert "tau-b" in report.read_text()
    (scored,) = read_bundle(a).servers
    assert scored.facts["device"] == "cpu"
    assert {"python", "torch", "numpy", "gpuscore"} <= set(scored.facts["versions"])
    assert scored.facts["flags"]["attention"] == "auto"
    assert scored.facts["hardware"]["cpu"]
    assert str(a.parent) not in a.read_text(), "no path of this machine"


def test_different_bundles_fail(recorded, capsys, tmp_path):
    (scored,) = read_bundle(recorded[1]).servers
    scored.results["short"].values[3, 1] += 2e-4
    assert compare(recorded[0], path := written(tmp_path / "c", scored)) == 1
    assert f"FAIL  {path} against {recorded[0]}, float32" in capsys.readouterr().out


def test_another_workload_is_refused(recorded, capsys):
    assert compare(recorded[0], recorded[2]) == 78
    said = "the workloads are quick, seed 0, of 400 token ids, and quick, seed 1"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer"])
def test_another_model_is_refused(made, tmp_path, capsys, part):
    first = written(tmp_path / "a", made)
    other = replace(made.digests, **{part: "0"})
    assert compare(first, written(tmp_path / "b", replace(made, digests=other))) == 78
    assert f"different models: the SHA-256 of their {part} is" in capsys.readouterr().err


def anew(**changes):
    """A change of the results of a bundle and of its digest, as by someone who edits both."""

    def change(text):
        content = json.loads(text)
        content["servers"][0]["results"]["softmax"] |= changes
        del content["sha256"]
        content["sha256"] = sha256(json.dumps(content, sort_keys=True).encode())
        return json.dumps(content)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("-700.25", "-700.26"), "was changed after it was written"),
        (lambda text: text[:-9], "is not a bundle of this version"),
        (lambda text: "[]", "its format is not 'gpuscore bundle 3'"),
        (lambda text: text.replace("bundle 3", "bundle 2"), "its format is not"),
        (anew(values=None), "missing required field `values`"),
        (anew(values=[[0, 0, 0]]), "the scores of softmax are (1, 3), not (1, 2)"),
        (anew(mass=[0.5]), "the label mass of softmax does not fit its items"),
    ],
)
def test_what_is_none_is_refused(made, tmp_path, capsys, change, message):
    path = written(tmp_path / "a", made)
    path.write_text(change(path.read_text()))
    assert compare(path, written(tmp_path / "b", made)) == 78
    error = capsys.readouterr().err
    assert error.startswith(f"gpuscore: {path} ")
    assert message in error
    assert error.count("\n") == 1


def test_no_file_and_a_folder_are_refused(made, tmp_path, capsys):
    path = written(tmp_path / "a", made)
    for other in (tmp_path, tmp_path / "missing"):
        assert compare(path, other) == 78
        assert f"{other} is not a bundle" in capsys.readouterr().err


class TestFingerprint:
    @pytest.fixture
    def copy(self, tiny_model, tmp_path):
        directory = tmp_path / "model"
        shutil.copytree(tiny_model("llama")[0], directory)
        return directory

    def test_shards_and_names_of_files_do_not_matter(self, copy):
        before = fingerprint(copy)
        tensors = load_file(copy / "model.safetensors")
        (copy / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: tensors[n] for n in names if files[n] == file}, copy / file)
        index = copy / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": files}))
        assert fingerprint(copy) == before

    def test_every_bit_of_the_weights_and_every_field_matters(self, copy):
        before = fingerprint(copy)
        tensors = load_file(copy / "model.safetensors")
        tensors["model.norm.weight"][-1] *= 1 + 1e-6
        save_file(tensors, copy / "model.safetensors")
        changed = fingerprint(copy)
        assert changed.weights != before.weights
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
        assert fingerprint(copy).config != before.config
        (copy / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere"}))
        assert fingerprint(copy).config == before.config
        (copy / "tokenizer.json").unlink()
        assert fingerprint(copy).tokenizer is None

    def test_a_damaged_file(self, copy):
        (copy / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{]")
        with pytest.raises(ConfigError, match="cannot be read as safetensors"):
            fingerprint(copy)
        (copy / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match="has neither model.safetensors"):
            fingerprint(copy)
