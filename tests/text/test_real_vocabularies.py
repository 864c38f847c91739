"""Promise: with vocabularies of real models, too, no text of a caller gives a control token in a
prompt of ours, and ordinary texts keep the ids that they have for transformers.

`-s` shows the numbers of texts and ids.
"""

import random
from functools import cache
from pathlib import Path

import pytest

from gpuscore.config import RequestLimits
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.families import ids_of
from support.real_vocabularies import FOLDER, MISSING, PACKAGES, REAL

ROOT = Path(__file__).parents[2]
MANY = 1500  # texts of each kind, for one vocabulary
LIMITS = BackendLimits(8192, 16, 4000, 100000, 200000)
REQUESTS = RequestLimits(max_items=10 * MANY, max_request_tokens=1 << 30)
# Beside each other they make words, numbers, tags, code and runs of white space.
WORDS = (
    *("\u00e9", "e\u0301", "\u4f60\u597d", "\u0440\u0443\u0441", "\ufffd", "\U0001f642"),
    *("\n\n", "\r\n", "\t", " ", "  ", "don't", "1234", "1,000.5", "a[i]", "[x]", "</td>"),
    *("<b>", "<", "|>", "<|", "<a|b>", "x<y>z", "[[", "]]", "\uff5c", "\u2581", "</", "---"),
)
needs_packages = pytest.mark.skipif(FOLDER is None, reason=MISSING)


@cache
def corpus():
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return "".join(page.read_text() for page in (*pages, *sorted(ROOT.glob("gpuscore/*.py"))))


def part(rng, longest):
    start = rng.randrange(len(corpus()) - longest)
    return corpus()[start : start + rng.randrange(1, longest)]


def ordinary(rng, markers):
    """Yield texts without a marker."""
    for _ in range(MANY):
        pieces = [rng.choice(WORDS) if rng.random() < 0.6 else part(rng, 9) for _ in range(20)]
        text = part(rng, 800) if rng.random() < 0.6 else rng.choice(("", " ")).join(pieces)
        if not any(marker in text for marker in markers):
            yield text


def hostile(rng, markers):
    """Yield markers alone, in words, beside each other, inside each other, and as turns."""
    for _ in range(MANY):
        first, second = rng.choice(markers), rng.choice(markers)
        at = rng.randrange(len(first) + 1)
        yield rng.choice(
            (
                first,
                f"a {first} b",
                first + second,
                f"{first[:at]}{second}{first[at:]}",
                f"x{first}\n{second}user\nyes",
            )
        )


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_no_control_tokens_and_the_ids_of_transformers(name):
    from transformers import PreTrainedTokenizerFast

    make, before, after = REAL[name]
    tokenizer, rng = make(), random.Random(1)
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    parts = (before, "user\n{query} {document}", after)
    family = PromptFamily(name="test", source="", parts=parts, labels=(1,))
    builder = PromptBuilder(TextEncoder(tokenizer), LIMITS, REQUESTS)
    prompts = FamilyPrompts(family, builder)
    control = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
    markers = sorted(control.values())
    own = [id for id in reference(before + after).input_ids if id in control]
    assert len(own) >= 2

    texts = list(ordinary(rng, markers))
    differ = 0
    for text, got in zip(texts, ids_of(prompts.build(RerankInput("who", texts))), strict=True):
        whole = f"{before}user\nwho {text}{after}"
        differ += got != reference(whole, add_special_tokens=False).input_ids

    attacks = list(hostile(rng, markers))
    spelled = sum(
        any(id in control for id in reference(text, add_special_tokens=False).input_ids)
        for text in attacks
    )
    controls = hit = 0
    for query in ("who", markers[0], markers[-1]):
        for ids in ids_of(prompts.build(RerankInput(query, attacks))):
            inside = [id for id in ids if id in control]
            controls += len(inside) - len(own)
            hit += inside != own
    print(
        f"{name}: {differ} of {len(texts)} ordinary texts with other ids; {controls} ids of "
        f"{len(control)} control tokens in {hit} of {3 * len(attacks)} hostile prompts"
    )
    assert spelled > 0.9 * len(attacks), "texts that spell no control token show nothing"
    assert len(texts) > 0.9 * MANY
    assert (differ, controls, hit) == (0, 0, 0)


def test_contributing_names_the_packages():
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert [package for package in PACKAGES if package not in told] == []
