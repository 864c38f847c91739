"""Promise: a bundle reads back as it was written; one that was changed, or that is of another model
or workload, is refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gpuscore.commands.cli import main
from gpuscore.errors import ConfigError
from gpuscore.measure import workload as workloads
from gpuscore.measure.bundle import About, Measured, read_bundle, write_folder
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.results import CaseResult, Errors, Fingerprint, Run, sha256
from gpuscore.measure.workload import Case, Workload

FILES = ["workload.json", "results.safetensors", "bundle.json"]


def record(model, output, *flags):
    words = ["parity", "record", str(model), "-o", str(output), "--workload", "quick"]
    return main([*words, "--threads", "1", "--max-batch-tokens", "512", *flags])


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory):
    """Two bundles of one model and workload, in different batches."""
    directory = tmp_path_factory.mktemp("bundles")
    model, _ = tiny_model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "MANY", 24)
        patch.setattr(workloads, "QUERIES", 2)
        assert record(model, directory / "a") == 0
        assert record(model, directory / "b", "--max-batch-tokens", "64") == 0
    return directory / "a", directory / "b"


@pytest.fixture
def made():
    """A small bundle in memory."""
    cases = (
        Case("ragged/ü", [5], [[6], []], [[1], [2, 3]]),
        Case("softmax", "q", ["a"], [[1, 2]], ["x", "y"], apply_softmax=True, prompts=[[1, 2]]),
    )
    values = np.array([[-1.5, np.nan], [-2.0, -700.25]])
    results = {
        "ragged/ü": CaseResult(values, np.array([0.25, 0.125])),
        "softmax": CaseResult(np.array([[-0.1, -2.35]]), None),
    }
    run = Run("torch:float32", "float32", results, Errors(4e-5, 3e-5, 2e-5, 1e-5))
    workload = Workload("made up", 7, 1, 60, 9, cases, ("text: none",))
    about = About("torch:float32", "score", "demo", 60, "float32", {"versions": {"a": "1"}})
    return Measured(about, workload, run, Fingerprint("w" * 64, "c" * 64, None))


def compare(a, b, *flags):
    return main(["parity", "compare", str(a), str(b), *flags])


def sums(directory):
    """Write the digests anew, as someone who edits a file and its digest would."""
    lines = [f"{sha256((directory / n).read_bytes())}  {n}\n" for n in FILES]
    (directory / "SHA256SUMS").write_text("".join(lines))


def test_it_comes_back_as_it_was_written(made, tmp_path):
    write_folder(tmp_path / "a", made)
    (bundle,) = read_bundle(tmp_path / "a").servers
    assert bundle.workload == made.workload
    assert bundle.model == made.model
    assert bundle.about.facts["versions"] == {"a": "1"}
    for name, expected in made.run.results.items():
        np.testing.assert_array_equal(bundle.run.results[name].values, expected.values)
        np.testing.assert_array_equal(bundle.run.results[name].mass, expected.mass)
    assert (bundle.run.name, bundle.run.dtype) == ("torch:float32", "float32")
    assert bundle.run.alone == made.run.alone


def test_equal_bundles_pass(recorded, capsys, tmp_path):
    report = tmp_path / "report.html"
    assert compare(*recorded, "--report", str(report)) == 0
    shown = capsys.readouterr().out
    assert "ok    b against a, float32: max |d log p|" in shown
    assert "ok    a, packing: alone and in company" in shown
    assert "tau-b" in report.read_text()
    about = json.loads((recorded[0] / "bundle.json").read_text())
    assert about["device"] == "cpu"
    assert {"python", "torch", "numpy", "gpuscore"} <= set(about["versions"])
    assert about["flags"]["attention"] == "auto"
    assert about["hardware"]["cpu"]
    assert str(recorded[0].parent) not in (recorded[0] / "bundle.json").read_text()


def test_different_bundles_fail(recorded, capsys, tmp_path):
    shutil.copytree(recorded[1], tmp_path / "b")
    (bundle,) = read_bundle(tmp_path / "b").servers
    bundle.run.results["short"].values[3, 1] += 2e-4
    write_folder(tmp_path / "c", bundle)
    assert compare(recorded[0], tmp_path / "c") == 1
    assert "FAIL  c against a, float32" in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused(recorded, tmp_path, capsys, name):
    """One bit changes, in the middle of the file."""
    copy = tmp_path / "copy"
    shutil.copytree(recorded[0], copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert compare(copy, recorded[1]) == 78
    assert f"{copy / name} was changed after the bundle was written" in capsys.readouterr().err


def test_a_workload_changed_together_with_its_digest_is_refused(recorded, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(recorded[0], copy)
    workload = json.loads((copy / "workload.json").read_text())
    workload["cases"][0]["query"][0] += 1
    (copy / "workload.json").write_text(json.dumps(workload))
    sums(copy)
    assert compare(copy, recorded[1]) == 78
    assert "workload_sha256 is not that of workload.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("bundle.json", b"[]", "is not a bundle of this version"),
        ("bundle.json", b'{"format": "other 2"}', "format is 'other 2'"),
        ("results.safetensors", b"no tensors", "is not a bundle of this version"),
        ("workload.json", b'{"cases": 5}', "is not a bundle of this version"),
    ],
)
def test_damaged_bundles_are_refused(made, tmp_path, file, content, message):
    write_folder(tmp_path / "a", made)
    (tmp_path / "a" / file).write_bytes(content)
    sums(tmp_path / "a")
    with pytest.raises(ConfigError, match="a is not a bundle") as error:
        read_bundle(tmp_path / "a")
    assert message in str(error.value)


def test_a_missing_file(made, tmp_path):
    with pytest.raises(ConfigError, match="is not a bundle"):
        read_bundle(tmp_path)
    write_folder(tmp_path / "a", made)
    (tmp_path / "a" / "workload.json").unlink()
    with pytest.raises(ConfigError, match="is not a bundle"):
        read_bundle(tmp_path / "a")


def test_results_of_another_shape(made, tmp_path):
    made.run.results["softmax"] = CaseResult(np.zeros((1, 3)), None)
    write_folder(tmp_path / "a", made)
    with pytest.raises(ConfigError, match="softmax/values"):
        read_bundle(tmp_path / "a")


def test_another_workload_is_refused(recorded, tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workloads, "MANY", 24)
    monkeypatch.setattr(workloads, "QUERIES", 2)
    assert record(tiny_model("llama")[0], tmp_path / "c", "--seed", "1") == 0
    assert compare(recorded[0], tmp_path / "c") == 78
    assert (
        "the workloads are quick, seed 0, of 400 token ids, and quick, seed 1"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer"])
def test_another_model_is_refused(made, tmp_path, capsys, part):
    write_folder(tmp_path / "a", made)
    other = Fingerprint(**{"weights": "w" * 64, "config": "c" * 64, "tokenizer": None, part: "0"})
    write_folder(tmp_path / "b", Measured(made.about, made.workload, made.run, other))
    assert compare(tmp_path / "a", tmp_path / "b") == 78
    assert f"different models: the SHA-256 of their {part} is" in capsys.readouterr().err


def test_nothing_is_overwritten(tiny_model, made, tmp_path, capsys):
    assert record(tiny_model("llama")[0], tmp_path) == 78
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="exists"):
        write_folder(tmp_path, made)


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
