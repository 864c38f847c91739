"""Promise: long texts are encoded in pieces, a text that is far too long is not encoded to its end,
and no legal text is refused for its length in characters."""

import random

import numpy as np
import pytest
from hypothesis import given
from tokenizers import Tokenizer

from gpuscore.config import RequestLimits
from gpuscore.errors import DeadlineExceeded, PromptTooLong, TooManyTokens
from gpuscore.text import boundaries as turns
from gpuscore.text.boundaries import OverLimit
from gpuscore.text.controls import byte_alphabet
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.counted_turns import Turned
from support.slow import slow
from support.tokenizer_search import ENGLISH, HARD, pair, plain, searched, texts
from support.tokenizers import OTHERS, SOME, trained


def test_the_alphabet_of_bytes_is_that_of_the_library():
    tokenizer = Tokenizer.from_str(trained("gpt2"))
    letters = dict(byte_alphabet())
    assert len(letters) == 256
    for text in ("a b\n", "\u00e9\u4f60\U0001f468\x00\x7f\u00ad"):
        (split,) = {"".join(p for p, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))}
        assert bytes(letters[c] for c in split) == text.encode()


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(turns, "PIECE_CHARS", 5)


@pytest.mark.parametrize("name", [*SOME, *slow(*OTHERS)])
def test_pieces_make_the_ids_of_the_whole(short_pieces, name):
    tokenizer, encoder = pair(name)

    @searched
    @given(texts, texts)
    def property(query, item):
        text = query + ENGLISH[:30] + item
        for special in (False, True):
            (got,) = encoder.prompts([text], special)
            assert got.tolist() == plain(tokenizer, text, special)
        got = [ids.tolist() for ids in encoder.joined(query, lambda _: [item, text, ""], False)(0)]
        assert got == [plain(tokenizer, query + ending) for ending in (item, text, "")]
        encoding = tokenizer.encode(text, add_special_tokens=False)
        for count in (1, 3, len(encoding.ids), len(encoding.ids) + 1):
            cut = len(encoding.ids) > count
            expected = text[: encoding.offsets[count - 1][1]] if cut else text
            assert encoder.first_tokens(text, count) == expected

    property()


def encoder_of(name="qwen2"):
    return TextEncoder(Tokenizer.from_str(trained(name)))


def test_given_up_between_two_pieces():
    with pytest.raises(DeadlineExceeded), Turned(3) as turned:
        next(encoder_of().prompts([ENGLISH * 10_000]))
    assert max(turned.asked) < 2 * turns.PIECE_CHARS


def test_the_rest_of_a_text_that_is_too_long_is_not_encoded():
    for name in ("qwen2", "granite"):  # the first has a bound, the second has none
        with pytest.raises(OverLimit) as over, Turned() as turned:
            next(encoder_of(name).prompts([ENGLISH * 20_000], limit=500))
        assert over.value.least > 500
        assert sum(turned.asked) < 2 * turns.PIECE_CHARS


def test_many_short_texts_are_many_turns():
    """A large number of texts takes time, however short they are."""
    with Turned() as turned:
        assert len(list(encoder_of().prompts(["a"] * 10_000))) == 10_000
    assert sum(turned.asked) > 10_000 * turns.TEXT_OVERHEAD
    assert max(turned.asked) <= turns.PIECE_CHARS


def test_a_cut_text_is_not_read_to_its_end():
    with Turned() as turned:
        assert len(encoder_of().first_tokens(ENGLISH * 20_000, 10)) < 100
    assert sum(turned.asked) < 2 * turns.PIECE_CHARS


WITHOUT_CUT = [("qwen2", "a"), ("llama2", " ")]
MORE = [(name, c) for name in ("qwen2", "llama3", "llama2") for c in "a 7!\u0301\u4f60\U0001f468"]


@pytest.mark.parametrize(
    ("name", "character"), [*WITHOUT_CUT, *slow(*(c for c in MORE if c not in WITHOUT_CUT))]
)
def test_a_cut_text_without_a_safe_cut_is_not_read_to_its_end(name, character):
    tokenizer, encoder = pair(name)
    text, count = character * 2_000_000, 10
    with Turned() as turned:
        cut = encoder.first_tokens(text, count)
    assert sum(turned.asked) < 4 * turns.PIECE_CHARS
    encoding = tokenizer.encode(text[:3000], add_special_tokens=False)
    assert cut == text[: encoding.offsets[count - 1][1]]


@pytest.mark.parametrize(("name", "character"), WITHOUT_CUT)
def test_a_long_text_without_a_safe_cut_is_refused_by_its_beginning(name, character):
    tokenizer, encoder = pair(name)
    text = character * 2_000_000
    with pytest.raises(OverLimit), Turned() as turned:
        next(encoder.prompts([text], limit=500))
    assert sum(turned.asked) < 4 * turns.PIECE_CHARS
    text = text[: 3 * turns.PIECE_CHARS]
    expected = tokenizer.encode(text).ids
    (got,) = encoder.prompts([text], limit=len(expected))
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(OverLimit):
        next(encoder.prompts([text], limit=len(expected) - 1))


def test_errors_have_numbers():
    limits = BackendLimits(64, 16, 100, 4000, 2000)
    made = PromptBuilder(encoder_of(), limits, RequestLimits())
    long = ENGLISH * 5000
    for query, items in (("", ["a", long]), (long, ["a", "b"])):
        with pytest.raises(PromptTooLong, match=r"at least \d{4,} tokens, the limit is 4000") as e:
            made.build(ScoreInput(query, items, label_token_ids=[1]))
        assert e.value.param == ("items[0]" if query else "items[1]")
    with pytest.raises(TooManyTokens, match=r"labels\[1\] is at least \d+ tokens"):
        made.build(ScoreInput("", ["a"], labels=["a", long]))


def test_a_long_text_that_is_legal():
    """The text is longer than a piece and has exactly the largest allowed number of tokens."""
    rng, tokenizer = random.Random(0), Tokenizer.from_str(trained("llama3"))
    text = "".join(rng.choice([*HARD, *ENGLISH.split(" "), " "]) for _ in range(40_000))
    expected = tokenizer.encode(text).ids
    (got,) = encoder_of("llama3").prompts([text], limit=len(expected))
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(OverLimit):
        next(encoder_of("llama3").prompts([text], limit=len(expected) - 1))
