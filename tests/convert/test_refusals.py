"""Promise: what cannot be converted exactly is refused by name, and nothing is left."""

import os
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from gpuscore.commands.cli import main
from support.gguf_files import GgufModel

LLAMA = ("llama", "llama-bpe")


@pytest.fixture
def made(tmp_path):
    return GgufModel(tmp_path, *LLAMA)


FIELDS = {  # changes of the metadata -> words of the refusal
    "another architecture": ({"general.architecture": "mamba"}, "the architecture 'mamba'; suppor"),
    "unknown key": ({"llama.rope.scaling.beta_slow": 1.0}, "key 'llama.rope.scaling.beta_slow'"),
    "pooling": ({"llama.pooling_type": 4}, "has the key 'llama.pooling_type'"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "scales RoPE by 'yarn'; supported: none, linear"),
    "linear": ({"llama.rope.scaling.type": "linear"}, "scaling.factor must be a number, found no"),
    "turned in part": ({"llama.rope.dimension_count": 8}, "heads of several sizes"),
    "a layer more": ({"llama.block_count": 4}, "has no tensor blk.3."),
    "a billion layers": ({"llama.block_count": 10**9}, "30 tensors for 1,000,000,000 layers"),
    "no layers": ({"llama.block_count": 0}, "llama.block_count is 0"),
    "a list": ({"llama.attention.head_count_kv": [2, 2]}, "must be an integer, found [2, 2]"),
    "no heads": ({"llama.attention.head_count": None}, "must be an integer, found nothing"),
    "other heads": ({"llama.attention.head_count": 8}, "[64, 48]; its metadata asks for [128, 48]"),
    "no tokenizer": ({"tokenizer.ggml.model": None}, "has no tokenizer"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
    "no texts": ({"tokenizer.ggml.tokens": [1, 2]}, "must be a list of texts"),
    "unknown split": ({"tokenizer.ggml.pre": "chatglm-bpe"}, "splits text by 'chatglm-bpe'"),
    "no split": ({"tokenizer.ggml.pre": None}, "splits text by None"),
    "another kind": ({"tokenizer.ggml.model": "bert"}, "a tokenizer of kind 'bert'"),
    "no such id": ({"tokenizer.ggml.eos_token_id": 10**6}, "cannot be read: IndexError"),
    "no template": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template must be a text"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_metadata(made, refused, case):
    fields, words = FIELDS[case]
    made.fields |= fields
    made.fields = {key: value for key, value in made.fields.items() if value is not None}
    if name := made.fields.pop("general.architecture", None):
        made.architecture = name
    line = refused(made.write())
    assert words in line
    assert str(made.path) in line or "/out." in line


def test_a_gap_between_words_of_sentencepiece(tmp_path, refused):
    made = GgufModel(tmp_path, "llama")
    made.fields["tokenizer.ggml.add_space_prefix"] = False
    assert "add_space_prefix is False" in refused(made.write())


TENSORS = {
    "dropped": (lambda all: all.pop("blk.1.attn_k.weight"), "has no tensor blk.1.attn_k.weight"),
    "one more": (
        lambda all: all.update({"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}),
        "has 1 tensors that LlamaForCausalLM does not use, such as 'blk.0.attn_sinks.weight'",
    ),
    "another shape": (
        lambda all: all.update({"blk.0.attn_norm.weight": np.ones(7, np.float32)}),
        "blk.0.attn_norm.weight has shape [7]; its metadata asks for [48]",
    ),
    "not a number": (
        lambda all: all["blk.2.ffn_up.weight"].__setitem__((3, 4), np.nan),
        "tensor model.layers.2.mlp.up_proj.weight holds NaN or infinity",
    ),
    "other divisors": (
        lambda all: all.update({"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}),
        "scales RoPE by rope_freqs.weight, but not as Llama 3.1 does",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(made, refused, case):
    change, words = TENSORS[case]
    change(made.tensors)
    assert words in refused(made.write())


def test_a_tensor_that_is_too_large_for_the_dtype(made, refused, convert):
    made.tensors["blk.0.ffn_up.weight"][0, 0] = 7e4
    path = made.write()
    assert "has 70000, too much for float16; choose --dtype" in refused(path, "--dtype", "float16")
    convert(path, "--dtype", "bfloat16")


def at(data, text):
    """Return the place behind a text of the header."""
    return data.index(text) + len(text)


def patched(data, place, layout, value):
    return data[:place] + struct.pack(layout, value) + data[place + struct.calcsize(layout) :]


DAMAGE = {
    "empty": (lambda data: b"", "is a damaged GGUF file"),
    "no GGUF": (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
    "version 1": (lambda data: patched(data, 4, "<I", 1), "version 1; supported: 2 and 3"),
    "big-endian": (lambda data: patched(data, 4, ">I", 3), "version 50331648; supported"),
    "a million tensors": (lambda data: patched(data, 8, "<Q", 10**6), "1,000,000 tensors"),
    "fields without end": (lambda data: patched(data, 16, "<Q", 2**63), "fields; supported: "),
    "a key without end": (lambda data: patched(data, 24, "<Q", 2**62), "bytes of a text"),
    "header cut off": (lambda data: data[:2000], "ends in its header, after 2,000 bytes"),
    "tensors cut off": (lambda data: data[:-5000], "should lie at"),
    "a list without end": (
        lambda data: patched(data, at(data, b"tokenizer.ggml.tokens") + 8, "<Q", 2**60),
        "entries of a list",
    ),
    "a list of lists": (
        lambda data: patched(data, at(data, b"tokenizer.ggml.tokens") + 4, "<I", 9),
        "a list has the type 9",
    ),
    "an unknown type": (
        lambda data: patched(data, at(data, b"llama.block_count"), "<I", 77),
        "a value has the unknown type 77",
    ),
    "an unknown format": (
        lambda data: patched(data, at(data, b"blk.0.attn_q.weight") + 20, "<I", 555),
        "555 is not a valid GGMLQuantizationType",
    ),
    "nine dimensions": (
        lambda data: patched(data, at(data, b"blk.0.attn_q.weight"), "<I", 9),
        "9 dimensions of tensor 'blk.0.attn_q.weight'",
    ),
    "a huge dimension": (
        lambda data: patched(data, at(data, b"blk.0.attn_q.weight") + 4, "<Q", 2**50),
        "tensor 'blk.0.attn_q.weight' should lie at",
    ),
    "an offset beyond the end": (
        lambda data: patched(data, at(data, b"blk.0.attn_q.weight") + 24, "<Q", 2**40),
        "tensor 'blk.0.attn_q.weight' should lie at",
    ),
    "a name twice": (
        lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"),
        "has a tensor 'blk.1.attn_q.weight' twice",
    ),
    "a key twice": (  # of the same length
        lambda data: data.replace(b"general.architecture", b"tokenizer.ggml.merge").replace(
            b"tokenizer.ggml.model", b"tokenizer.ggml.merge"
        ),
        "has 'tokenizer.ggml.merge' twice",
    ),
    "no UTF-8": (
        lambda data: data.replace(b"llama.vocab_size", b"llama.vocab_siz\xff"),
        "can't decode byte 0xff",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file(made, refused, case):
    change, words = DAMAGE[case]
    path = made.write()
    path.write_bytes(change(path.read_bytes()))
    assert words in refused(path)


def test_every_cut_of_the_header_is_refused(made, refused):
    path = made.write()
    data = path.read_bytes()
    for size in np.random.default_rng(0).integers(1, 10_000, 30).tolist():
        path.write_bytes(data[:size])
        assert "is a damaged GGUF file: it ends in its header" in refused(path)


def test_sources_of_other_kinds(tmp_path, refused):
    assert "is not there; supported: a GGUF file, a directory with one" in refused(tmp_path / "no")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "GGUF files there: none" in refused(folder)
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"")
    assert "GGUF files there: a.gguf, b.gguf" in refused(folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert "gpuscore serve takes it as it is" in refused(folder)


def test_a_directory_that_is_there(tmp_path, made, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    assert main(["convert", str(made.write()), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    assert main(["convert", str(made.path), str(out)]) == 0, "an empty one is taken"
    assert main(["convert", str(made.path), str(tmp_path / "no" / "out")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_a_directory_of_one_file(tmp_path, made, convert):
    folder = tmp_path / "folder"
    folder.mkdir()
    made.write().rename(folder / "model-Q8_0.gguf")
    (folder / "config.json").write_text("{")  # transformers must not read it
    convert(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path, made, number):
    place = tmp_path / "place"
    place.mkdir()
    words = [sys.executable, "-P", "-m", "gpuscore", "convert", str(made.write()), str(place / "o")]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        limit = time.monotonic() + 120
        while not list(place.iterdir()):
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, number)
        assert process.wait(60) == 128 + number
    assert not list(place.iterdir())


@pytest.mark.parametrize("package", ["gguf", "accelerate", "transformers"])
def test_without_the_extra_one_line_says_so(tmp_path, package):
    code = (
        f"import sys; sys.modules[{package!r}] = None; from gpuscore.commands.cli import main; "
        f"sys.exit(main(['convert', 'x.gguf', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 78
    line = f"gpuscore: gpuscore convert needs {package}: pip install 'accelerate>="
    assert done.stderr.startswith(line)
    assert f"'{package}>=" in done.stderr
