"""Promise: for every tokenizer, ids made with a cut query equal the joined string's."""

import json
import re
import unicodedata

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from gpuscore.text import boundaries
from gpuscore.text.controls import find_specials
from gpuscore.text.pretokens import LETTERS, STOPS, VISIBLE
from gpuscore.text.tokenizer import TextEncoder
from support.slow import slow
from support.tokenizer_search import ENGLISH, check, pair, search
from support.tokenizers import LAYOUTS, OTHERS, QWEN2, SOME, splits, trained


@pytest.mark.parametrize("name", [*SOME, *slow(*OTHERS)])
def test_ids_are_those_of_the_joined_string(name):
    search(*pair(name))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plain_query_is_cut_near_its_end(name):
    """Without such cuts the property would hold trivially."""
    bounds = pair(name)[1].boundaries
    assert bounds.first(ENGLISH) < 60
    assert len(ENGLISH) - bounds.last(ENGLISH) < 60


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_all_prompts_share_depends_on_the_query_alone(name):
    encoder = pair(name)[1]
    items = ["", "s", " dog", "\n\n", ENGLISH, "\u0301x"]
    for query in (ENGLISH, ENGLISH[:-7], ENGLISH + "\n", "ab"):
        count = encoder.num_shared(query)
        prompts = [*encoder.joined(query, lambda _: items, item_first=False)(0)]
        assert all((prompt[:count] == prompts[0][:count]).all() for prompt in prompts)
        assert min(map(len, prompts)) >= count
    assert encoder.num_shared(ENGLISH) > 0


def test_chinese_without_spaces_is_cut():
    text = "\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 20
    assert pair("qwen2")[1].boundaries.last(text) == len(text) - 1


def test_the_query_is_encoded_once():
    tokenizer, encoded = Tokenizer.from_str(trained("qwen2")), []

    class Counting:
        def encode_batch_fast(self, texts, **options):
            encoded.extend(map(len, texts))
            return tokenizer.encode_batch_fast(texts, **options)

    encoder = TextEncoder(tokenizer)
    encoder.tokenizer = Counting()
    for item_first in (False, True):
        encoded.clear()
        assert len([*encoder.joined(ENGLISH * 20, lambda _: ["a dog"] * 100, item_first)(0)]) == 100
        assert sum(encoded) < len(ENGLISH) * 20 + 100 * 70


# ---- tokenizers that must fall back ----


def changed(name, **parts):
    tokenizer = Tokenizer.from_str(trained(name))
    for part, value in parts.items():
        setattr(tokenizer, part, value)
    return tokenizer


def with_model(name, **fields):
    state = json.loads(trained(name))
    state["model"] |= fields
    return Tokenizer.from_str(json.dumps(state))


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
FALLS_BACK = {
    "dropout": lambda: with_model("qwen2", dropout=0.1),
    "entries of a whole pre-token": lambda: with_model("llama2", ignore_merges=True),
    "two texts with one id": lambda: with_model(
        "llama2", vocab=json.loads(trained("llama2"))["model"]["vocab"] | {"<copy>": 5}
    ),
    "unknown normalizer": lambda: changed("qwen2", normalizer=normalizers.NFKC()),
    "regex normalizer": lambda: changed("llama2", normalizer=normalizers.Strip()),
    "no split at all": lambda: changed("gpt2", pre_tokenizer=BYTE_LEVEL),
    "unknown regex": lambda: changed("gpt2", pre_tokenizer=splits(r"\w+ ?|\s+")),
    "an empty alternative": lambda: changed("gpt2", pre_tokenizer=splits(QWEN2 + "|")),
    "a normalizer before the regex": lambda: changed(
        "qwen2", normalizer=normalizers.Replace(" ", "\u2581")
    ),
    "unigram without pre-tokens": lambda: changed(
        "unigram", pre_tokenizer=pre_tokenizers.Metaspace(split=False)
    ),
    "unknown post-processor": lambda: changed(
        "qwen2", post_processor=processors.BertProcessing(("a", 1), ("b", 2))
    ),
    "a text used twice": lambda: changed(
        "qwen2",
        post_processor=processors.TemplateProcessing(single="$A $A", special_tokens=[]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLS_BACK)
def test_without_a_proof_the_whole_string_is_encoded(name):
    tokenizer = FALLS_BACK[name]()
    encoder = TextEncoder(tokenizer)
    assert encoder.boundaries is None
    if name != "dropout":
        check(tokenizer, encoder, ENGLISH, ["", " a dog", "e"])


def test_sampling_falls_back():
    model = models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)
    assert boundaries.is_deterministic(model)
    if hasattr(model, "alpha"):
        model.alpha = 0.5
        assert not boundaries.is_deterministic(model)


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [("$A", [], []), ("<s> $A", [0], []), ("$A </s>", [], [1]), ("<s> <s> $A </s>", [0, 0], [1])],
)
def test_special_tokens_are_found(template, opening, closing):
    tokenizer = changed("gpt2")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    specials = find_specials(tokenizer)
    assert (specials.opening.tolist(), specials.closing.tolist()) == (opening, closing)


# ---- the facts that the proofs rely on ----


def members(characters):
    return re.findall(f"[{characters}]", "".join(map(chr, range(0x10000))))


def test_the_characters_around_a_cut_stay_themselves():
    """NFC changes neither l nor r, and r joins nothing on either side."""
    visible = members(VISIBLE)
    seconds, firsts = set(), set()
    for code in range(0x110000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            firsts.add(chr(int(parts[0], 16)))
            seconds.add(chr(int(parts[1], 16)))
    seconds |= {chr(c) for c in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for right in " " + STOPS:
        assert unicodedata.combining(right) == 0
        assert right not in firsts | seconds
    nfc = normalizers.NFC()
    for left in visible:
        start = unicodedata.normalize("NFD", left)[0]
        assert unicodedata.combining(start) == 0
        assert start not in seconds
    joined = " ".join(visible) + " "
    assert nfc.normalize_str(joined) == joined


def test_letters_are_letters_for_the_regex_engine():
    def pieces(pattern, text):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return [piece for piece, _ in split.pre_tokenize_str(text)]

    letters, visible = "".join(members(LETTERS)), "".join(members(VISIBLE))
    assert pieces(r"[\p{L}\p{N}]+", letters) == [letters]
    assert pieces(r"\S+", visible) == [visible]
    for stop in STOPS:
        assert pieces(r"\p{P}|\s", stop + "a") == [stop, "a"]
        assert not re.match(f"[{LETTERS}]", stop)
