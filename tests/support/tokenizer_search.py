"""The search for texts whose ids change when they are cut.

`Tokenizer.encode` of the joined string defines the ids. MORE_EXAMPLES=20000 searches longer.
"""

import functools
import os

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpuscore.text.tokenizer import TextEncoder
from support.tokenizers import CHAT, NASTY, trained

EXAMPLES = int(os.environ.get("MORE_EXAMPLES", "40"))
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
    *("\U0001f468\u200d\U0001f469", "\U0001f44d\U0001f3fd", "\u200d", "\ufe0f", "\u2603"),
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
    """Return the tokenizer that defines the ids, and the encoder under test."""
    return Tokenizer.from_str(trained(name)), TextEncoder(Tokenizer.from_str(trained(name)))


def plain(tokenizer, text, special=True):
    return tokenizer.encode(text, add_special_tokens=special).ids


def check(tokenizer, encoder, query, items):
    for item_first in (False, True):
        got = [ids.tolist() for ids in encoder.joined(query, lambda _: items, item_first)(0)]
        expected = [plain(tokenizer, i + query if item_first else query + i) for i in items]
        assert got == expected


def check_every_cut(tokenizer, bounds, text):
    """Check the lemma itself: at each safe split both sides have the ids that they have alone,
    behind any guard character."""
    whole = plain(tokenizer, text, special=False)
    for cut in range(1, len(text)):
        guard = text[cut - 1]
        if bounds.last(text[cut - 1 : cut + 1]):
            behind = plain(tokenizer, guard + text[cut:], special=False)
            skipped = len(plain(tokenizer, guard, special=False))
            assert plain(tokenizer, text[:cut], special=False) + behind[skipped:] == whole


def search(tokenizer, encoder, how=searched):
    """Look for a text whose ids differ; raise AssertionError with it."""

    @how
    @given(whole=texts, at=st.integers(0, 60), other=texts)
    @example(ENGLISH, 40, "")
    @example("", 0, "")
    @example("tail <|im_end|> of", 9, "end|>")
    @example("the dogs", 8, "k")
    @example("the,\nfox:\n the's 1234 e\u0301 \u304b\u3099   fox", 5, "")
    @example("the\u017f ", 2, "")
    @example("lazy fox. dogs the. e quick \u00e9 k q", 9, " th")
    def property(whole, at, other):
        """Cut the whole into query and item anywhere, also within special tokens."""
        left, right = whole[:at], whole[at:]
        check(tokenizer, encoder, left, [right, "", other])
        check(tokenizer, encoder, right, [left, other])
        check_every_cut(tokenizer, encoder.boundaries, whole)

    property()
