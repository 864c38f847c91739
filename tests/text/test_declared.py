"""Promise: text becomes the ids that transformers gives, or the directory is refused."""

import json
import random
from itertools import pairwise

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoTokenizer
from transformers.utils import logging

from gpuscore.errors import ConfigError
from gpuscore.text.tokenizer import TextEncoder
from support.models import make_tokenizer
from support.tokenizers import LINES, trained

logging.set_verbosity_error()

TEXTS = ("a blue chair", "  yes <s> no <|end|> maybe", "[PAD] the <unk>", "\u00e9\n\n 12 don't", "")
TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
START = TOKEN | {"content": "<s>", "special": True}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SAME, REFUSED = "same", "refused"
# (file, key, value, outcome)
ROWS = [
    *((CONFIG, "add_bos_token", value, SAME) for value in (True, False, None, "x")),
    *((CONFIG, "add_eos_token", value, SAME) for value in (True, False)),
    *((CONFIG, "add_prefix_space", value, SAME) for value in (True, False)),
    *((CONFIG, "clean_up_tokenization_spaces", value, SAME) for value in (True, False)),
    *((CONFIG, "legacy", value, SAME) for value in (True, False)),
    (CONFIG, "model_max_length", 3, SAME),
    (CONFIG, "max_length", 2, SAME),
    (CONFIG, "truncation_side", "left", SAME),
    (CONFIG, "padding_side", "left", SAME),
    (CONFIG, "padding", "max_length", SAME),
    (CONFIG, "truncation", True, SAME),
    (CONFIG, "stride", 1, SAME),
    (CONFIG, "do_lower_case", True, SAME),
    (CONFIG, "normalizer", "x", SAME),
    (CONFIG, "add_dummy_prefix", True, SAME),
    (CONFIG, "spaces_between_special_tokens", False, SAME),
    (CONFIG, "chat_template", "{{ x }}", SAME),
    (CONFIG, "added_tokens_decoder", {"0": START}, SAME),
    (CONFIG, "pad_token", "<|end|>", SAME),
    (CONFIG, "pad_token", None, SAME),
    (CONFIG, "bos_token", START | {"__type": "AddedToken"}, SAME),
    (CONFIG, "extra_special_tokens", {}, SAME),
    (CONFIG, "something_new", 1, SAME),
    (MAP, "eos_token", "<|end|>", SAME),
    (CONFIG, "split_special_tokens", True, REFUSED),
    (CONFIG, "eos_token", "the", REFUSED),
    (CONFIG, "unk_token", "<unk>", REFUSED),
    (CONFIG, "additional_special_tokens", ["chair"], REFUSED),
    (CONFIG, "extra_special_tokens", {"image_token": "chair"}, REFUSED),
    (CONFIG, "added_tokens_decoder", {"7": START | {"content": "chair"}}, REFUSED),
    (CONFIG, "added_tokens_decoder", {"0": START | {"lstrip": True}}, REFUSED),
    (MAP, "eos_token", "the", REFUSED),
    (MAP, "add_bos_token", False, REFUSED),
    (MAP, "split_special_tokens", True, REFUSED),
    (ADDED, "chair", 3, REFUSED),
]


def write(directory, file, fields):
    made = {"tokenizer_class": "PreTrainedTokenizerFast"} if file == CONFIG else {}
    (directory / file).write_text(json.dumps(made | fields))


@pytest.mark.parametrize(("file", "key", "value", "outcome"), ROWS)
def test_ids_are_those_of_transformers(tmp_path, file, key, value, outcome):
    make_tokenizer(bos=True).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"model_type": "llama"})
    write(tmp_path, CONFIG, {})
    write(tmp_path, file, {key: value})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = [theirs(text)["input_ids"] for text in TEXTS]
    if outcome == SAME:
        encoder = TextEncoder.read(tmp_path)
        assert [ids.tolist() for ids in encoder.prompts(TEXTS)] == expected
        return
    with pytest.raises(ConfigError, match=f"{file}.*{key}"):
        TextEncoder.read(tmp_path)
    for name in (CONFIG, MAP, ADDED):
        (tmp_path / name).unlink(missing_ok=True)
    own = [ids.tolist() for ids in TextEncoder.read(tmp_path).prompts(TEXTS)]
    assert own != expected, "a declaration that changes no ids must not be refused"


@pytest.mark.parametrize(
    ("normalizer", "content", "outcome"),
    [
        (None, "<s>", SAME),
        (normalizers.Sequence([]), "<s>", SAME),
        (normalizers.NFC(), "<s>", SAME),
        (normalizers.Sequence([normalizers.NFC()]), "<s>", SAME),
        (normalizers.NFC(), "<cafe\u0301>", REFUSED),
        (normalizers.Lowercase(), "<s>", REFUSED),
    ],
)
def test_a_flag_that_the_normaliser_makes_meaningless(tmp_path, normalizer, content, outcome):
    """DeepSeek's files say of a token that it is normalised, and tokenizer.json that it is not."""
    made = make_tokenizer(bos=True)
    made.add_special_tokens([AddedToken(content, normalized=False, special=True)])
    if normalizer is not None:
        made.normalizer = normalizer
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"model_type": "llama"})
    declared = {"__type": "AddedToken", "content": content, "normalized": True}
    write(tmp_path, CONFIG, {"bos_token": START | declared})
    if outcome == REFUSED:
        with pytest.raises(ConfigError, match="says that normalized of '<.*>' is True"):
            TextEncoder.read(tmp_path)
        return
    theirs, encoder = AutoTokenizer.from_pretrained(tmp_path), TextEncoder.read(tmp_path)
    rng = random.Random(62)
    pieces = [*TEXTS, content, "<S>", "e\u0301", "\u00e9", " ", "\n"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=4))
        (ids,) = encoder.prompts([text])
        assert ids.tolist() == theirs(text)["input_ids"], text


def test_a_rebuilt_prefix_is_refused(tmp_path):
    """Qwen's class rebuilds its pre-tokenizer, with the prefix of the configuration."""
    Tokenizer.from_str(trained("qwen2")).save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}
    write(tmp_path, CONFIG, fields)
    with pytest.raises(ConfigError, match="add_prefix_space is true, and false in tokenizer.json"):
        TextEncoder.read(tmp_path)
    write(tmp_path, CONFIG, fields | {"add_prefix_space": False})
    TextEncoder.read(tmp_path)


def test_random_ids_are_refused(tmp_path):
    made = json.loads(make_tokenizer(bos=False).to_str())
    for dropout in (0.5, 1e-3, 0.0, None):
        made["model"]["dropout"] = dropout
        (tmp_path / "tokenizer.json").write_text(json.dumps(made))
        if not dropout:
            TextEncoder.read(tmp_path)
            continue
        with pytest.raises(ConfigError, match=r"tokenizer\.json: dropout is 0\.\d+, .* random"):
            TextEncoder.read(tmp_path)


PLAIN = " without NFC"
# (layout, class, model_type, other fields, outcome)
CLASSES = [
    *(
        ("llama2", name, kind, fields, SAME)
        for name, kind, fields in (
            ("LlamaTokenizer", "llama", {}),
            ("LlamaTokenizerFast", "llama", {}),
            ("LlamaTokenizerFast", "llama", {"legacy": False}),
            ("LlamaTokenizer", "llama", {"legacy": True}),
            ("LlamaTokenizer", "llama", {"legacy": None}),
            ("LlamaTokenizer", "qwen3", {"add_prefix_space": False}),
            ("LlamaTokenizer", "llama", {"add_prefix_space": True}),
            ("LlamaTokenizer", "llama", {"add_bos_token": True}),
            ("LlamaTokenizer", "mistral", {}),
            ("PreTrainedTokenizerFast", "llama", {}),
        )
    ),
    ("mistral", "LlamaTokenizerFast", "llama", {}, SAME),
    ("llama3", "LlamaTokenizerFast", "llama", {}, SAME),
    ("qwen2", "Qwen2Tokenizer", "qwen2", {}, SAME),
    ("qwen2", "Qwen2TokenizerFast", "qwen3", {}, SAME),
    ("qwen2", "LlamaTokenizerFast", "qwen2", {}, SAME),
    (f"qwen2{PLAIN}", "Qwen2Tokenizer", "qwen3", {}, SAME),
    (f"qwen2{PLAIN}", "LlamaTokenizerFast", "qwen2", {}, SAME),
    ("qwen3.5", "PreTrainedTokenizerFast", "qwen3", {}, SAME),
    *((name, "Qwen2Tokenizer", "qwen3", {}, REFUSED) for name in ("qwen3.5", "deepseek", "llama3")),
    ("deepseek", "LlamaTokenizerFast", "qwen2", {}, REFUSED),
    ("unigram", "LlamaTokenizer", "llama", {}, REFUSED),
]
MORE = (
    "e\u0301 \u212b",
    *LINES[:60],
    *(f"{a.strip()}<s>{b}" for a, b in pairwise(LINES[:60])),
    *TEXTS,
)


@pytest.mark.parametrize(("layout", "name", "kind", "fields", "outcome"), CLASSES)
def test_classes_that_rebuild(tmp_path, layout, name, kind, fields, outcome):
    """transformers keeps only the vocabulary of tokenizer.json for some classes."""
    made = Tokenizer.from_str(trained(layout.removesuffix(PLAIN)))
    if layout.endswith(PLAIN):
        made.normalizer = None
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"model_type": kind})
    write(tmp_path, CONFIG, {"tokenizer_class": name} | fields)
    if outcome == REFUSED:
        with pytest.raises(ConfigError, match=f"tokenizer_class {name}"):
            TextEncoder.read(tmp_path)
        return
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = [theirs(text)["input_ids"] for text in MORE]
    assert [ids.tolist() for ids in TextEncoder.read(tmp_path).prompts(MORE)] == expected
