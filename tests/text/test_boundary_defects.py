"""Promise: the search's own examples show every defect planted in the rules for cuts.

This keeps the property honest: a search that misses these defects would prove nothing.
"""

import dataclasses
import json
import re

import pytest
from hypothesis import Phase, settings
from tokenizers import Tokenizer, models, pre_tokenizers

from gpuscore.text import boundaries
from gpuscore.text.pretokens import LETTERS, STOPS, VISIBLE
from gpuscore.text.tokenizer import TextEncoder
from support.tokenizer_search import check_every_cut, pair, search, searched
from support.tokenizers import trained

NOTHING: frozenset[str] = frozenset()


EVERYTHING = frozenset(map(chr, range(0x10000)))


def fields(**changes):
    """Plant wrong facts about a tokenizer."""
    return lambda patch, bounds: dataclasses.replace(bounds, **changes)


def cuts(pattern, more=""):
    """Plant a wrong choice of the pairs to cut at."""

    def plant(patch, bounds):
        patch.setattr(boundaries, "PAIR", re.compile(pattern))
        rights = bounds.rights | set(more)
        return dataclasses.replace(
            bounds, rights=rights, starts=rights if bounds.starts else bounds.starts
        )

    return plant


def anywhere(patch, bounds):
    patch.setattr(boundaries, "PAIR", re.compile(r"[\s\S]{2}"))
    return dataclasses.replace(
        bounds, rights=EVERYTHING, starts=EVERYTHING, endings=NOTHING, pairs=NOTHING
    )


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
    encoder.boundaries = DEFECTS[name](monkeypatch, encoder.boundaries)
    # Random texts show each of them too, but some only after thousands, and not in every process.
    examples_only = settings(searched, phases=[Phase.explicit])
    with pytest.raises(AssertionError):
        search(pair(layout)[0], encoder, examples_only)


# ---- reasons why two layouts fall back although no entry lies across the cut ----


def test_an_entry_that_merges_cannot_make():
    """With `ignore_merges` a text that is one entry becomes one token, but only if it stands
    alone."""
    state = json.loads(trained("llama2"))
    vocab = state["model"]["vocab"]
    vocab["\u2581ek"] = max(vocab.values()) + 1
    bounds = boundaries.find_boundaries(Tokenizer.from_str(json.dumps(state)))
    state["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    assert boundaries.find_boundaries(tokenizer) is None
    with pytest.raises(AssertionError):
        check_every_cut(tokenizer, bounds, "ek fox")


def test_a_near_tie_of_unigram_is_decided_by_what_is_before():
    """Two paths after the space have equal scores: rounding of the sum so far decides between
    them."""
    scores = {"\u2581": -1.0, "a": -4.3, "bc": -7.1, "ab": -7.1, "c": -4.3, "q": -5.7}
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *scores.items()], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    ends = {tuple(tokenizer.encode("q" * n + " abc").tokens[-2:]) for n in range(1, 100)}
    assert ends == {("a", "bc"), ("ab", "c")}
    assert boundaries.find_boundaries(tokenizer) is None
