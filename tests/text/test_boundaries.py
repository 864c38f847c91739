"""Promise: ids made with a cut query are those of the joined string, for every tokenizer.

The plain way is `Tokenizer.encode` of the joined string. MORE_EXAMPLES=20000 searches longer.
"""

import dataclasses
import functools
import json
import os
import re
import unicodedata

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from gpuscore.text import boundaries
from gpuscore.text.pretokens import LETTERS, STOPS, VISIBLE
from gpuscore.text.specials import find_specials
from gpuscore.text.tokenizer import TextEncoder
from support.tokenizers import CHAT, LAYOUTS, NASTY, QWEN2, splits, trained

EXAMPLES = int(os.environ.get("MORE_EXAMPLES", "60"))
searched = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
ENGLISH = (
    "Which of these animals jumps over lazy dogs? The quick brown fox does so all day long, "
    "and nobody knows who has told it to."
)
HARD = [
    *("the", "The", "quick", "fox.", "dogs", "lazy", "end.", "line", "of", "it's", "'s", "'"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\r", "\u00a0", "\u3000", "\u2028"),
    *(".", ",", "...", "!?", "-", "(", "\u3002", "\uff0c", "/", "\u037e", ";", "<", "\u2581"),
    *("1", "12", "123", "1234", "12345678", "\u00bd", "\u0663", "\u0664", "\x00", "\x1c"),
    *("\u0301", "\u0338", "e\u0301", "\u00e9", "\u0327\u0301", "\u1e9b\u0323", "\u0f71\u0f72"),
    *("\u1100", "\u1161", "\u11a8", "\uac00", "\ud55c", "\u304b", "\u3099", "\u304c", "\u597d"),
    *(
        "\U0001f468\u200d\U0001f469",
        "\U0001f44d\U0001f3fd",
        "\u200d",
        "\ufe0f",
        "\u2603",
        "\u017f;",
    ),
    *(*CHAT, "\u017f", "<|im_", "end|>", "</s>", "<s>", "<unk>", "<0x0A>", "</i>"),
    *(token.content for token in NASTY),
]
USUAL = [" ", " ", "e", "the", "k", "."]
texts = st.lists(
    st.one_of(st.sampled_from(HARD), st.sampled_from(USUAL), st.characters(codec="utf-8")),
    max_size=14,
).map("".join)


@functools.cache
def pair(name):
    """The tokenizer that defines the ids, and the encoder that is tested."""
    return Tokenizer.from_str(trained(name)), TextEncoder(Tokenizer.from_str(trained(name)))


def plain(tokenizer, text, special=True):
    return tokenizer.encode(text, add_special_tokens=special).ids


def check(tokenizer, encoder, query, items):
    for item_first in (False, True):
        got = [ids.tolist() for ids in encoder.joined(query, items, item_first)]
        want = [plain(tokenizer, i + query if item_first else query + i) for i in items]
        assert got == want


def check_every_cut(tokenizer, bounds, text):
    """The lemma itself: at each safe cut the sides are what they are alone, behind any guard."""
    whole = plain(tokenizer, text, special=False)
    for cut in range(1, len(text)):
        guard = text[cut - 1]
        if bounds.last(text[cut - 1 : cut + 1]):
            behind = plain(tokenizer, guard + text[cut:], special=False)
            skipped = len(plain(tokenizer, guard, special=False))
            assert plain(tokenizer, text[:cut], special=False) + behind[skipped:] == whole


def search(tokenizer, encoder, how=searched):
    """Look for a text at which the ids differ; raises AssertionError with it."""

    @how
    @given(whole=texts, at=st.integers(0, 60), other=texts)
    @example(ENGLISH, 40, "")
    @example("", 0, "")
    @example("tail <|im_end|> of", 9, "end|>")
    @example("the dogs", 8, "k")
    def property(whole, at, other):
        """The whole is cut into query and item anywhere, also within special tokens."""
        left, right = whole[:at], whole[at:]
        check(tokenizer, encoder, left, [right, "", other])
        check(tokenizer, encoder, right, [left, other])
        check_every_cut(tokenizer, encoder._boundaries, whole)

    property()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_are_those_of_the_joined_string(name):
    search(*pair(name))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plain_query_is_cut_near_its_end(name):
    """Otherwise the property would hold for nothing."""
    bounds = pair(name)[1]._boundaries
    assert bounds.first(ENGLISH) < 60
    assert len(ENGLISH) - bounds.last(ENGLISH) < 60


def test_chinese_without_spaces_is_cut():
    text = "\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 20
    assert pair("qwen2")[1]._boundaries.last(text) == len(text) - 1


def test_the_query_is_encoded_once(monkeypatch):
    encoder = TextEncoder(Tokenizer.from_str(trained("qwen2")))
    encode, encoded = encoder._encode, []

    def counting(piece, special):
        encoded.extend(map(len, piece))
        return encode(piece, special)

    monkeypatch.setattr(encoder, "_encode", counting)
    for item_first in (False, True):
        encoded.clear()
        assert len([*encoder.joined(ENGLISH * 20, ["a dog"] * 100, item_first)]) == 100
        assert sum(encoded) < len(ENGLISH) * 20 + 100 * 70


# ---- what must fall back ----


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
    assert encoder._boundaries is None
    if name != "dropout":
        check(tokenizer, encoder, ENGLISH, ["", " a dog", "e"])


def test_sampling_falls_back():
    model = models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)
    assert boundaries._is_deterministic(model)
    if hasattr(model, "alpha"):
        model.alpha = 0.5
        assert not boundaries._is_deterministic(model)


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [("$A", [], []), ("<s> $A", [0], []), ("$A </s>", [], [1]), ("<s> <s> $A </s>", [0, 0], [1])],
)
def test_special_tokens_are_found(template, opening, closing):
    tokenizer = changed("gpt2")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    found = find_specials(tokenizer)
    assert (found.opening.tolist(), found.closing.tolist()) == (opening, closing)


# ---- what the proofs rely on ----


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


# ---- defects planted on purpose: the search must find each ----

NOTHING: frozenset[str] = frozenset()


EVERYTHING = frozenset(map(chr, range(0x10000)))


def fields(**changes):
    """A defect in what is known of a tokenizer."""
    return lambda patch, bounds: dataclasses.replace(bounds, **changes)


def cuts(pattern, more=""):
    """A defect in which pairs are looked at."""

    def plant(patch, bounds):
        patch.setattr(boundaries, "PAIR", re.compile(pattern))
        rights = bounds.rights | set(more)
        return dataclasses.replace(
            bounds, rights=rights, starts=rights if bounds.starts else bounds.starts
        )

    return plant


def anywhere(patch, bounds):
    patch.setattr(boundaries.Boundaries, "_safe", lambda *_: True)
    return bounds


DEFECTS = {
    "gpt2: cut anywhere": anywhere,
    "llama2: cut anywhere": anywhere,
    "unigram: cut anywhere": anywhere,
    "qwen2, nasty tokens: added tokens are ignored": fields(pairs=NOTHING, endings=NOTHING),
    "qwen2, nasty tokens: their pairs are ignored": fields(pairs=NOTHING),
    "unigram, nasty tokens: their endings are ignored": fields(endings=NOTHING),
    "llama2, nasty tokens: their endings are ignored": fields(endings=NOTHING),
    "qwen2: NFC is ignored": cuts(f"[{LETTERS}][\u0301\u3099\u0338]", "\u0301\u3099\u0338"),
    "qwen2: line ends behind punctuation": cuts(f"[{VISIBLE}][ {STOPS}]"),
    "gpt2: white space behind white space": cuts(f"[{VISIBLE} \n][ \n]"),
    "o200k: contractions": cuts(f"[{LETTERS}]'", "'"),
    "llama3: within digits": cuts("[0-9][0-9]", "0123456789"),
    "llama2: merges are ignored": fields(merged=NOTHING),
    "mistral: merges are ignored": fields(merged=NOTHING),
    "no unknown token: unknown characters are ignored": fields(singles=EVERYTHING),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(monkeypatch, name):
    layout = name.split(":")[0]
    encoder = TextEncoder(Tokenizer.from_str(trained(layout)))
    encoder._boundaries = DEFECTS[name](monkeypatch, encoder._boundaries)
    first_only = settings(searched, max_examples=4000, phases=[Phase.explicit, Phase.generate])
    with pytest.raises(AssertionError):
        search(pair(layout)[0], encoder, first_only)
