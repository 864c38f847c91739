"""Draws typed questions about the demo's world, each with its right answer.

A state is an item, alone or with the query that it shall fit, as text or as JSON. A question is
about an attribute of the item, or about how well it fits the query. Some rows are about nothing
that can be known: there all answers are equally probable, so the model learns to answer with a
label at any rate. The prompts are the server's (`demo.decision_texts`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from demo import synthetic
from demo.asked import Asked, Marks, Mention, choice_of, listed, moved, noul, score_of, starts
from demo.decision_texts import Option, json_text
from demo.synthetic import Attributes, Query
from demo.world import NEUTRAL_WORDS, VALUES_OF, wordings

STATEMENT = "Is this statement true?\n"  # as /v1/decisions asks
NOT_SAID = ("not said", "unknown", "none of these", "anything else")
MOST_OPTIONS = 26
FITS = ("Does the item fit the query?", "Is this what the query asks for?", "Is it a match?")
GRADES = (
    ("no match", "a weak match", "a good match", "a full match"),
    ("not at all", "a little", "mostly", "fully"),
    ("bad", "fair", "good", "perfect"),
)
HOW_WELL = (
    "How well does the item fit the query?",
    "How good a match is it?",
    "How relevant is it?",
)
ASK = {
    "kind": ("What is it?", "What kind of thing is it?", "What is sold here?"),
    "category": ("Which category is it in?", "Where in the shop does it belong?"),
    "colour": ("What colour is it?", "Which colour does the item have?"),
    "material": ("What is it made of?", "Which material is it?"),
    "size": ("What size is it?", "How large is it?"),
    "style": ("What style is it?", "How does it look?"),
    "price": ("What does it cost?", "How expensive is it?"),
    "season": ("Which season is it for?", "When is it used?"),
    "purpose": ("What is it for?", "What purpose does it have?"),
}
SCALES = ("size", "price")  # slots whose values have an order


@dataclass(frozen=True)
class TypedGroup:
    """A state and questions about it.

    Attributes:
        attributes: of the item, as it states them.
        combination: the attributes that the query asks for, or, without a query, the item's.
            Training must never see a combination that is held out.
    """

    state: str
    attributes: Attributes
    combination: tuple[tuple[str, str], ...]
    questions: tuple[Asked, ...]


@dataclass(frozen=True)
class _Scene:
    """The facts that questions are about: what the item states, and how many of the query's
    attributes are among that; `asked` is 0 for an item alone."""

    attributes: Attributes
    asked: int
    held: int


def draw_typed_group(
    rng: random.Random, count: int, held_out: bool = False, plain: bool = False
) -> TypedGroup:
    """Draw a state with `count` questions.

    Args:
        held_out: the attributes of the item, or of the query if there is one, are a combination
            that training never sees.
        plain: an item alone, and questions with few options: the beginning of learning.
    """
    if not plain and not held_out and rng.random() < 0.06:
        return _unknown(rng, count)
    query = None
    if plain or rng.random() < 0.55:
        item = synthetic.draw_thing(rng, held_out, chatty=rng.random() < 0.1)
        held = 0
    else:
        query = synthetic.draw_query(rng, held_out=held_out, min_attributes=1 + held_out)
        held = synthetic.draw_held(rng, len(query.requested))
        item = synthetic.draw_item(rng, query, held, rng.random() < 0.1)
    attributes = synthetic.attributes_of(item)
    scene = _Scene(attributes, len(query.requested) if query else 0, held)
    questions = tuple(_question(rng, scene, plain) for _ in range(count))
    text = _state(rng, item.text, query, plain)
    stated = tuple(pair for pair in attributes.items() if pair[0] != "category")
    return TypedGroup(text, attributes, query.requested if query else stated, questions)


def _state(rng: random.Random, item: str, query: Query | None, plain: bool) -> str:
    roll = rng.random()
    fields = {"item": item} if query is None else {"query": query.text, "item": item}
    if plain:
        return item
    if roll < 0.25:
        return json_text(fields)
    if query is not None:
        item = synthetic.prompt_query(query.text) + item
    elif roll < 0.4:
        item = f"item: {item}"
    if roll > 0.9:
        item = f"{synthetic.draw_preamble(rng, rng.randint(1, 10))}\n{item}"
    return item


def _question(rng: random.Random, scene: _Scene, plain: bool) -> Asked:
    draw: Callable[[random.Random, _Scene], Asked]
    if plain:
        draw = rng.choice((_is_it, _few_values, _scale))
    elif scene.asked and rng.random() < 0.6:
        draw = rng.choice((_fits, _how_well))
    else:
        draw = rng.choice((_is_it, _is_it, _values, _values, _few_values, _phrases, _scale))
    return draw(rng, scene)


def _fits(rng: random.Random, scene: _Scene) -> Asked:
    text = rng.choice(FITS)
    full = scene.held == scene.asked
    if rng.random() < 0.3:
        told = ("it has all that is asked for", "something is missing")
        return noul("fits", full, text, *told)
    if rng.random() < 0.3:
        text = STATEMENT + "The item has everything that the query asks for."
    return noul("fits", full, text)


def _how_well(rng: random.Random, scene: _Scene) -> Asked:
    grade = synthetic.relevance_grade(scene.held, scene.asked)
    levels = [(name, "") for name in rng.choice(GRADES)]
    return score_of("how well", grade, rng.choice((None, *HOW_WELL)), levels)


def _is_it(rng: random.Random, scene: _Scene) -> Asked:
    """Ask if the item has one to three attributes."""
    known = scene.attributes
    count = 1 if rng.random() < 0.7 else rng.randint(2, 3)
    holds = rng.random() < 0.5
    slots = rng.sample(sorted(known), min(count, len(known)))
    asked = {slot: known[slot] for slot in slots}
    if not holds:
        slot = rng.choice(sorted(ASK)) if rng.random() < 0.3 else rng.choice(slots)
        asked[slot] = synthetic.other_values(rng, slot, known.get(slot), 1)[0]
    if {"kind", "category"} <= set(asked):
        asked.pop("category" if asked["kind"] != known["kind"] else "kind")
    right = all(known.get(slot) == value for slot, value in asked.items())
    phrase, marks = synthetic.phrase(rng, asked)
    texts: tuple[str | None, ...]
    roll = rng.random()
    if roll < 0.35:
        texts = (f"{STATEMENT}{rng.choice(('It is', 'This is', 'The item is'))} {phrase}.",)
    elif roll < 0.75:
        texts = (f"{rng.choice(('Is it', 'Is this', 'Is the item'))} {phrase}?",)
    elif roll < 0.9:
        texts = (None, phrase, rng.choice((None, "anything else", "something else")))
    else:
        texts = (rng.choice(("Does it fit?", "Is it right?")), phrase)
    made = noul("is it", right, *texts)
    return replace(made, mentions=moved(marks, made.question.text.index(phrase)))


def _values(rng: random.Random, scene: _Scene) -> Asked:
    return _which(rng, scene, rng.randint(2, 12 if rng.random() < 0.8 else MOST_OPTIONS))


def _few_values(rng: random.Random, scene: _Scene) -> Asked:
    return _which(rng, scene, rng.randint(2, 4))


def _which(rng: random.Random, scene: _Scene, most: int) -> Asked:
    """Ask for the value of one attribute, which may not be said or not be among the options."""
    slot = rng.choice(sorted(scene.attributes))
    if rng.random() < 0.1:
        slot = rng.choice(sorted(ASK))
    known = scene.attributes.get(slot)
    names = synthetic.other_values(rng, slot, known, most - 1)
    escape = known is None or rng.random() < 0.2
    if known is not None and not (escape and rng.random() < 0.4):
        names.append(known)
    values: list[str | None] = [*names[-MOST_OPTIONS + 1 :]]
    rng.shuffle(values)
    if escape or len(values) < 2:
        values.append(None)
    told = rng.random() < 0.2
    options = [_option(rng, slot, value, told) for value in values]
    right = values.index(known) if known in values else values.index(None)
    made = choice_of("which", right, _asking(rng, slot), options)
    return replace(made, mentions=listed(made, slot, values))


def _scale(rng: random.Random, scene: _Scene) -> Asked:
    """Ask for a level: of a slot whose values have an order, or of any list of values."""
    slots = [slot for slot in SCALES if slot in scene.attributes]
    slot = rng.choice(slots) if slots else rng.choice(sorted(scene.attributes))
    known = scene.attributes[slot]
    values: list[str | None] = [*VALUES_OF[slot]]
    if slot not in SCALES:
        values = [*synthetic.other_values(rng, slot, known, rng.randint(1, 9)), known]
        rng.shuffle(values)
    options = [_option(rng, slot, value, False) for value in values]
    made = score_of("scale", values.index(known), _asking(rng, slot), options)
    return replace(made, mentions=listed(made, slot, values))


def _phrases(rng: random.Random, scene: _Scene) -> Asked:
    """Ask which of several descriptions with one or two attributes is right."""
    known = scene.attributes
    count = rng.randint(2, 6)
    right = rng.randrange(count)
    marks: dict[str, Marks] = {}
    for number in range(count):
        slots = rng.sample(sorted(known), rng.randint(1, min(2, len(known))))
        if {"kind", "category"} <= set(slots):
            slots = ["kind"]
        stated = {slot: known[slot] for slot in slots}
        if number != right:
            for slot in slots if rng.random() < 0.6 else slots[:1]:
                stated[slot] = synthetic.other_values(rng, slot, known[slot], 1)[0]
        text, phrase_marks = synthetic.phrase(rng, stated)
        marks.setdefault(text, phrase_marks)  # the same text twice is one option
        if number == right:
            answer = list(marks).index(text)
    options = [(text, "") for text in marks]
    asked = None if rng.random() < 0.6 else "Which is true of it?"
    made = choice_of("phrases", answer, asked, options)
    mentions: list[Mention] = []
    for ends, at in zip(marks.values(), starts(made), strict=True):
        mentions += moved(ends, at)
    return replace(made, mentions=tuple(mentions))


def _asking(rng: random.Random, slot: str) -> str | None:
    return None if rng.random() < 0.15 else rng.choice(ASK[slot])


def _option(rng: random.Random, slot: str, value: str | None, told: bool) -> Option:
    if value is None:
        return rng.choice(NOT_SAID), ""
    words = wordings(slot, value)
    name = words[0] if rng.random() < 0.6 else rng.choice(words)
    others = [word for word in words if word != name]
    return name, rng.choice(others) if told and others else ""


def _unknown(rng: random.Random, count: int) -> TypedGroup:
    """Draw a state that says nothing of the questions, in words that the world does not know."""
    state = " ".join(synthetic.neutral_sentence(rng) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.3:
        state = json_text({rng.choice(NEUTRAL_WORDS): state})
    return TypedGroup(state, {}, (), tuple(_unknown_question(rng) for _ in range(count)))


def _unknown_question(rng: random.Random) -> Asked:
    text = synthetic.neutral_sentence(rng)[:-1] + "?"
    names = rng.sample(NEUTRAL_WORDS, rng.randint(2, 8))
    sentence = synthetic.neutral_sentence
    options = [(name, rng.choice(("", "", sentence(rng)))) for name in names]
    kind = rng.randrange(4)
    if kind < 2:
        return noul("unknown", None, text if kind == 0 else f"{STATEMENT}{text[:-1]}.")
    if kind == 2:
        return choice_of("unknown", None, text, options)
    levels = [(f"{name}: {told}" if told else name, "") for name, told in options]
    return score_of("unknown", None, text, levels)
