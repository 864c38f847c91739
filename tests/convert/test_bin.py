"""Promise: weights pickled by torch are converted exactly, and no code of them runs."""

import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from gpuscore import Scorer
from support.models import make_model, random_ids, reference_logprobs
from support.slow import slow

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Made:
    """A model directory with .bin files, and transformers' model of it."""

    def __init__(self, directory, shards=1, **overrides):
        self.path, self.model = directory, make_model(directory, **overrides)
        self.state = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        self.shards = shards
        self.write()

    def write(self):
        if self.shards == 1:
            torch.save(self.state, self.path / "pytorch_model.bin")
            return
        self.map = {}
        for number in range(self.shards):
            file = f"pytorch_model-{number + 1:05}-of-{self.shards:05}.bin"
            part = {name: self.state[name] for name in sorted(self.state)[number :: self.shards]}
            torch.save(part, self.path / file)
            self.map |= dict.fromkeys(part, file)
        self.write_index()

    def write_index(self):
        index = {"metadata": {}, "weight_map": self.map}
        (self.path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "it's [mine]")


@pytest.fixture
def sharded(tmp_path):
    return Made(tmp_path / "source", shards=3)


@pytest.mark.parametrize(
    ("family", "shards"), [("qwen3", 1), ("gemma2", 3), *slow(("llama", 2), ("qwen3_moe", 1))]
)
def test_it_scores_as_the_original(tmp_path, convert, family, shards):
    made = Made(tmp_path / "source", shards, family=family)
    directory = convert(made.path)
    written = {}
    for path in directory.glob("*.safetensors"):
        written |= load_file(path)
    assert written.keys() == made.state.keys()
    assert all(torch.equal(written[name], made.state[name]) for name in written)
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE
    query, *items = (random_ids(np.random.default_rng(length), length) for length in (30, 3, 20))
    expected = reference_logprobs(made.model, [query + item for item in items])[:, [1, 2, 3]]
    with Scorer(str(directory), dtype="float32", device="cpu", max_batch_tokens=64) as scorer:
        got = scorer.score(query, items, label_token_ids=[1, 2, 3]).scores
    np.testing.assert_allclose(np.log(got), expected, atol=1e-4)


def test_tensors_that_share_memory(tmp_path, convert):
    made = Made(tmp_path / "source", tie_word_embeddings=True)
    made.state["lm_head.weight"] = made.state["model.embed_tokens.weight"]
    made.write()
    convert(made.path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype(made, convert, dtype):
    made.state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in made.state.items()}
    made.write()
    directory = convert(made.path)
    written = load_file(directory / "model.safetensors")
    assert all(torch.equal(written[name], made.state[name]) for name in made.state)
    assert json.loads((directory / "config.json").read_text())["dtype"] == dtype


def test_an_older_tokenizer_becomes_tokenizer_json(made, convert):
    alphabet = [*map(chr, range(33, 127)), "\u0120", "th", "the"]
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[("t", "h"), ("th", "e")])
    (made.path / "tokenizer.json").unlink()
    (made.path / "vocab.json").write_text(json.dumps(vocabulary))
    (made.path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (made.path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    directory = convert(made.path)
    written = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert written.encode("the thin hat").ids == tokenizer("the thin hat")["input_ids"]


def change_index(made, name, file):
    made.map[name] = file
    made.write_index()


def drop_shard(made):
    (made.path / made.map["model.norm.weight"]).unlink()


def leave_directory(made):
    torch.save({"model.norm.weight": torch.zeros(48)}, made.path.parent / "outside.bin")
    change_index(made, "model.norm.weight", "../outside.bin")


SHARDS = {
    "a shard is missing": (drop_shard, "which is not a file of"),
    "outside": (leave_directory, "names '../outside.bin', which is not a file of"),
    "absolute": (lambda m: change_index(m, "model.norm.weight", "/etc/passwd"), "'/etc/passwd'"),
    "no name": (lambda m: change_index(m, "model.norm.weight", 7), "names 7"),
    "in no shard": (
        lambda m: change_index(m, "x", m.map["model.norm.weight"]),
        "has no tensor 'x'",
    ),
    "in two shards": (
        lambda m: torch.save(m.state, m.path / m.map["model.norm.weight"]),
        "have a tensor",
    ),
    "no index": (lambda m: (m.path / "pytorch_model.bin.index.json").unlink(), "has neither"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_an_index_that_is_wrong(sharded, refused, case):
    change, words = SHARDS[case]
    change(sharded)
    assert words in refused(sharded.path)


class Touch:
    """An object whose reading writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_no_code_runs(tmp_path, made, refused):
    trace = tmp_path / "trace"
    made.state["x"] = Touch(trace)
    made.write()
    assert "cannot be read: UnpicklingError: Weights only load failed" in refused(made.path)
    assert not trace.exists()
    (made.path / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(trace)))
    trace.unlink(missing_ok=True)
    assert "is damaged, or written by torch before 1.6" in refused(made.path)
    assert not trace.exists()


def test_remote_code_does_not_run(tmp_path, made, refused):
    trace = tmp_path / "trace"
    (made.path / "own.py").write_text(f"open({str(trace)!r}, 'w')")
    config = json.loads((made.path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoTokenizer": "own.Own"}
    (made.path / "config.json").write_text(json.dumps(config))
    assert "auto_map is a value; supported: models without remote code" in refused(made.path)
    assert not trace.exists()


def rewrite(path, change):
    """Write a .bin file anew with other bytes or another compression."""
    with zipfile.ZipFile(path) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, change(name, data))


def test_sizes_are_bounded(made, refused):
    path = made.path / "pytorch_model.bin"
    rewrite(path, lambda name, data: data + bytes(2**24) if name.endswith("/0") else data)
    assert "and would become" in refused(made.path)
    made.state["model.norm.weight"] = torch.zeros(1).expand(2**40)
    made.write()
    assert "bytes for tensors of" in refused(made.path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def several_disks(made):
    """Say so in the end record, which Python's zipfile cannot read then."""
    path = made.path / "pytorch_model.bin"
    data = path.read_bytes()
    place = data.index(b"PK\x06\x07") + 16  # the number of disks, in the locator of zip64
    path.write_bytes(data[:place] + b"\x02" + data[place + 1 :])


def without(*names):
    def change(made):
        for name in names:
            (made.path / name).unlink()

    return change


def configured(**words):
    def change(made):
        config = json.loads((made.path / "config.json").read_text())
        (made.path / "config.json").write_text(json.dumps(config | words))

    return change


def saved(content):
    return lambda made: torch.save(content, made.path / "pytorch_model.bin")


FILES = {
    "cut off": (lambda m: cut(m.path / "pytorch_model.bin"), "is damaged"),
    "several disks": (several_disks, "cannot be read: BadZipFile"),
    "no config": (without("config.json"), "has no config.json"),
    "no tokenizer": (without("tokenizer.json"), "has no tokenizer (tokenizer.json, vocab.json"),
    "a damaged tokenizer": (lambda m: cut(m.path / "tokenizer.json"), "cannot be read as a token"),
    "quantised": (configured(quantization_config={"quant_method": "gptq"}), "is quantised"),
    "another architecture": (configured(architectures=["BloomForCausalLM"]), "'BloomForCausalLM'"),
    "a list": (saved([torch.zeros(2)]), "has list, and not tensors by name"),
    "a number": (saved({"model.norm.weight": 3}), "has 'model.norm.weight', which is no tensor"),
    "nothing": (saved({}), "has no tensors"),
    "a tensor": (saved({"x": torch.zeros(2)}), "the checkpoint has no tensor model.embed_tokens"),
}


@pytest.mark.parametrize("case", FILES)
def test_other_refusals(made, refused, case):
    change, words = FILES[case]
    change(made)
    assert words in refused(made.path)
