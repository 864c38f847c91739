"""A small synthetic shopping world for training and testing the demonstration model.

A query asks for a thing with one to five attributes (kind or category, colour, material, size,
style, price, season, purpose), each worded in one of several ways. An item is a short product
text that states some attributes of one thing. Relevance is graded by how many of the requested
attributes the item states. Everything is a function of the seed; only the standard library is
used, so tests can draw tasks without loading a model.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from demo.world import (
    ADJECTIVE_ORDER,
    ANYTHING,
    ASKING,
    BY_NAME,
    CATEGORY_OF,
    CATEGORY_WORDS,
    INSTRUCTIONS,
    ITEM_FILLER,
    ITEM_OPENING,
    JOINING_WORDS,
    KINDS,
    NEUTRAL_WORDS,
    QUERY_FILLER,
    SPEC_NAMES,
    UNCOUNTED,
    VALUES,
    VALUES_OF,
)

Attributes: TypeAlias = dict[str, str]  # value by slot
PROMPT_QUERY = "query: {query}\nitem: "
LABELS = ("yes", "no")
MAX_ATTRIBUTES = 5
# One attribute combination in this many is kept out of training and used for evaluation.
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Query:
    """A request: the attributes asked for and the text that asks for them."""

    requested: tuple[tuple[str, str], ...]
    text: str


@dataclass(frozen=True)
class Statement:
    """An attribute that an item's text has stated once `end` characters have been read."""

    end: int
    slot: str
    value: str


@dataclass(frozen=True)
class Item:
    """A product text and the attributes it states, in reading order."""

    text: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class TrainingGroup:
    """One query, an optional preamble to put before its prompt, and items to judge."""

    query: Query
    preamble: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class RankingTask:
    """A held-out query with candidate items and their graded relevance (0 to 3)."""

    query_text: str
    item_texts: tuple[str, ...]
    relevance: tuple[int, ...]


@dataclass(frozen=True)
class _Piece:
    """A run of text; `slot` and `value` are set when it states an attribute."""

    text: str
    slot: str = ""
    value: str = ""


def prompt_query(query_text: str, preamble: str = "") -> str:
    """Return the part of the prompt before the item, optionally after a preamble line."""
    lead = f"{preamble}\n" if preamble else ""
    return lead + PROMPT_QUERY.format(query=query_text)


def held_count(query: Query, item: Item, upto: int | None = None) -> int:
    """Count the requested attributes stated within the item's first `upto` characters."""
    end = len(item.text) if upto is None else upto
    stated = {(s.slot, s.value) for s in item.statements if s.end <= end}
    for slot, value in tuple(stated):
        if slot == "kind":
            stated.add(("category", CATEGORY_OF[value]))
    return sum(attribute in stated for attribute in query.requested)


def verdict(query: Query, statement: Statement) -> int:
    """Judge one statement: 0 when nothing like it was requested, 1 when it fits, 2 when not."""
    asked = dict(query.requested)
    slot, value = statement.slot, statement.value
    if slot == "kind" and "category" in asked:
        slot, value = "category", CATEGORY_OF[value]
    if slot not in asked:
        return 0
    return 1 if asked[slot] == value else 2


def relevance_grade(held: int, asked: int) -> int:
    """Grade relevance: 3 when all is held, 2 from three fifths on, 1 from three tenths, else 0."""
    if held == asked:
        return 3
    share = held / asked
    return 2 if share >= 0.6 else 1 if share >= 0.3 else 0


def answer_target(held: int, asked: int) -> float:
    """Return the probability of "yes" to train towards.

    Only a full match is a "yes"; partial matches stay well below one half, but the more they
    hold the higher, so that the score also ranks them.
    """
    if held == asked:
        return 0.98
    return 0.01 + 0.39 * math.pow(held / asked, 1.5)


def is_held_out(requested: Sequence[tuple[str, str]]) -> bool:
    """Tell whether this combination of attributes is reserved for evaluation.

    Single attributes are never reserved: without them the words themselves would be unknown.
    """
    key = ";".join(f"{slot}={value}" for slot, value in sorted(requested))
    return len(requested) > 1 and zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def ndcg_at_k(scores: Sequence[float], relevance: Sequence[int], k: int) -> float:
    """Return the normalised discounted cumulative gain (gain 2**relevance - 1) of a ranking."""
    if len(scores) != len(relevance):
        raise ValueError("scores and relevance must have the same length")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    best = _dcg(sorted(relevance, reverse=True)[:k])
    return _dcg([relevance[i] for i in order[:k]]) / best if best > 0 else 0.0


def _dcg(grades: Sequence[int]) -> float:
    return math.fsum(((1 << grade) - 1) / math.log2(rank + 2) for rank, grade in enumerate(grades))


def draw_query(
    rng: random.Random,
    held_out: bool = False,
    min_attributes: int = 1,
    max_attributes: int = MAX_ATTRIBUTES,
) -> Query:
    """Draw a query from the training combinations, or from the held-out ones."""
    while True:
        requested = _draw_request(rng, rng.randint(min_attributes, max_attributes))
        if is_held_out(requested) == held_out:
            return Query(requested, _query_text(rng, dict(requested)))


def draw_item(rng: random.Random, query: Query, held: int, chatty: bool = False) -> Item:
    """Draw an item that states exactly `held` of the attributes that the query requests."""
    kept = dict(rng.sample(query.requested, held))
    asked = dict(query.requested)
    kind = _draw_kind(rng, kept, asked)
    attributes = _draw_attributes(rng, kind, kept, asked)
    return _item_text(rng, attributes, chatty)


def draw_thing(rng: random.Random, held_out: bool = False, chatty: bool = False) -> Item:
    """Draw an item that nobody asked for, in a training combination or a held-out one."""
    while True:
        kind = rng.choice(sorted(KINDS))
        attributes = {"kind": kind}
        for slot in VALUES:
            if rng.random() < 0.5:
                attributes[slot] = _draw_value(rng, kind, slot)
        if is_held_out(tuple(attributes.items())) == held_out:
            return _item_text(rng, attributes, chatty)


def attributes_of(item: Item) -> Attributes:
    """Return what an item's text states, with the category of its kind."""
    stated = {statement.slot: statement.value for statement in item.statements}
    if "kind" in stated:
        stated["category"] = CATEGORY_OF[stated["kind"]]
    return stated


def other_values(rng: random.Random, slot: str, unlike: str | None, count: int) -> list[str]:
    """Draw up to `count` different values of a slot, none of them `unlike`."""
    names = [name for name in VALUES_OF[slot] if name != unlike]
    return rng.sample(names, min(count, len(names)))


def phrase(
    rng: random.Random, attributes: Attributes
) -> tuple[str, tuple[tuple[int, str, str], ...]]:
    """Word attributes as a description; also return where each one ends, with slot and value."""
    if len(attributes) == 1 and not {"kind", "category"} & set(attributes):
        ((slot, value),) = attributes.items()
        pieces = [_attribute(rng, slot, value, after=rng.random() < 0.3)]
    else:
        pieces = _noun_phrase(rng, attributes)
    item = _stating(pieces)
    return item.text, tuple((mark.end, mark.slot, mark.value) for mark in item.statements)


def _plain_item(rng: random.Random, query: Query, held: int) -> Item:
    kept, asked = dict(rng.sample(query.requested, held)), dict(query.requested)
    attributes = _draw_attributes(rng, _draw_kind(rng, kept, asked), kept, asked)
    return _stating(_keywords(rng, attributes))


def draw_training_group(
    rng: random.Random,
    n_items: int,
    max_attributes: int = MAX_ATTRIBUTES,
    long_text: bool = False,
    plain: bool = False,
) -> TrainingGroup:
    """Draw a training query with items from no match to full match.

    With `long_text` the query carries a preamble, much filler, or both. With `plain` query and
    items are bare keywords, which is where learning can begin.
    """
    query = draw_query(rng, max_attributes=max_attributes)
    if plain:
        query = Query(query.requested, _join(_keywords(rng, dict(query.requested)))[0])
        helds = [draw_held(rng, len(query.requested)) for _ in range(n_items)]
        return TrainingGroup(query, "", tuple(_plain_item(rng, query, h) for h in helds))
    preamble = ""
    if long_text:
        query, preamble = _lengthen(rng, query)
    elif rng.random() < 0.1:
        preamble = " ".join(rng.sample(INSTRUCTIONS, rng.randint(1, 2)))
    items = [
        draw_item(rng, query, draw_held(rng, len(query.requested)), rng.random() < 0.1)
        for _ in range(n_items)
    ]
    return TrainingGroup(query, preamble, tuple(items))


def draw_ranking_tasks(
    seed: int, count: int, candidates: int = 40, min_attributes: int = 2
) -> tuple[RankingTask, ...]:
    """Draw ranking tasks whose queries combine attributes in ways never seen in training."""
    rng = random.Random(f"ranking-{seed}")
    return tuple(_draw_task(rng, candidates, min_attributes) for _ in range(count))


def _draw_task(rng: random.Random, candidates: int, min_attributes: int) -> RankingTask:
    query = draw_query(rng, held_out=True, min_attributes=min_attributes)
    asked = len(query.requested)
    full, near = rng.randint(2, 4), rng.randint(4, 8)
    held = [asked] * full + [asked - 1] * near
    # The other items state less, so that a random order is far from the ideal one.
    held += [rng.randint(0, max(0, asked - 2)) for _ in range(candidates - full - near)]
    rng.shuffle(held)
    items = [draw_item(rng, query, h, rng.random() < 0.1) for h in held]
    grades = tuple(relevance_grade(held_count(query, item), asked) for item in items)
    return RankingTask(query.text, tuple(item.text for item in items), grades)


def draw_held(rng: random.Random, asked: int) -> int:
    """Draw how many requested attributes a training item states: often all or all but one."""
    roll = rng.random()
    if roll < 0.3:
        return asked
    return asked - 1 if roll < 0.6 else rng.randint(0, asked)


def _draw_request(rng: random.Random, count: int) -> tuple[tuple[str, str], ...]:
    kind = rng.choice(sorted(KINDS))
    slots = rng.sample(sorted(VALUES), count)
    if rng.random() < 0.8:
        slots[0] = "category" if rng.random() < 0.25 else "kind"
    return tuple(sorted((slot, _draw_value(rng, kind, slot)) for slot in slots))


def _draw_value(rng: random.Random, kind: str, slot: str, unlike: str = "") -> str:
    """Draw a value that makes sense for the kind, and differs from `unlike`."""
    category = KINDS[kind][1]
    if slot in ("kind", "category"):
        return kind if slot == "kind" else category.name
    names = [value.name for value in VALUES[slot]]
    if slot in ("material", "purpose"):
        names = list(category.materials if slot == "material" else category.purposes)
    return rng.choice([name for name in names if name != unlike])


def _draw_kind(rng: random.Random, kept: dict[str, str], asked: dict[str, str]) -> str:
    """Choose a kind that states the kept attributes and none of the other requested ones."""

    def denied(kind: str) -> bool:
        stated = {"kind": kind, "category": CATEGORY_OF[kind]}
        return any((stated[s] == v) != (s in kept) for s, v in asked.items() if s in stated)

    def sensible(kind: str) -> bool:
        category = KINDS[kind][1]
        material, purpose = kept.get("material"), kept.get("purpose")
        fits = material is None or material in category.materials
        return fits and (purpose is None or purpose in category.purposes)

    allowed = [kind for kind in sorted(KINDS) if not denied(kind)]
    return rng.choice([kind for kind in allowed if sensible(kind)] or allowed)


def _draw_attributes(
    rng: random.Random, kind: str, kept: dict[str, str], asked: dict[str, str]
) -> dict[str, str]:
    """Choose the item's attributes: all kept ones, and for others another value or none."""
    attributes = {"kind": kind}
    for slot in VALUES:
        if slot in kept:
            attributes[slot] = kept[slot]
        elif slot in asked:
            if rng.random() < 0.75:
                attributes[slot] = _draw_value(rng, kind, slot, unlike=asked[slot])
        elif rng.random() < 0.35:
            attributes[slot] = _draw_value(rng, kind, slot)
    return attributes


def _pick_form(rng: random.Random, forms: Sequence[str]) -> str:
    return forms[0] if rng.random() < 0.4 else rng.choice(forms)


def _article(rng: random.Random, first_word: str) -> str:
    if rng.random() < 0.1:
        return "the"
    return "an" if first_word[0].lower() in "aeiou" else "a"


def _head(rng: random.Random, attributes: dict[str, str]) -> _Piece:
    """Name the thing: by kind, by category, or just as something."""
    if "kind" in attributes:
        words = KINDS[attributes["kind"]][0]
        return _Piece(_pick_form(rng, words), "kind", attributes["kind"])
    if "category" in attributes:
        words = CATEGORY_WORDS[attributes["category"]]
        return _Piece(_pick_form(rng, words), "category", attributes["category"])
    return _Piece(rng.choice(ANYTHING))


def _attribute(rng: random.Random, slot: str, name: str, after: bool) -> _Piece:
    value = BY_NAME[slot, name]
    return _Piece(_pick_form(rng, value.after if after else value.before), slot, name)


def _split_slots(
    rng: random.Random, attributes: dict[str, str]
) -> tuple[list[_Piece], list[_Piece]]:
    """Word each attribute either as an adjective or as a phrase after the noun."""
    before: list[_Piece] = []
    after: list[_Piece] = []
    for slot in ADJECTIVE_ORDER:
        if slot in attributes:
            usual = 0.75 if slot in ("season", "purpose") else 0.25
            is_after = rng.random() < usual
            target = after if is_after else before
            target.append(_attribute(rng, slot, attributes[slot], is_after))
    rng.shuffle(after)
    if rng.random() < 0.4:
        rng.shuffle(before)
    return before, after


def _noun_phrase(rng: random.Random, attributes: dict[str, str]) -> list[_Piece]:
    """Word the attributes as one noun phrase: "a small red wool scarf for winter"."""
    head = _head(rng, attributes)
    before, after = _split_slots(rng, attributes)
    if not head.slot and head.text in UNCOUNTED:
        pieces = [head, *before]
    else:
        pieces = [*before, head]
        if head.text not in UNCOUNTED and rng.random() < 0.6:
            pieces.insert(0, _Piece(_article(rng, pieces[0].text)))
    comma = "," if rng.random() < 0.2 else ""
    for piece in after:
        pieces += [_Piece(comma), piece] if comma else [piece]
    return pieces


def _keywords(rng: random.Random, attributes: dict[str, str]) -> list[_Piece]:
    """Word the attributes as keywords in any order: "wool, scarf, red"."""
    pieces = [_attribute(rng, s, v, False) for s, v in attributes.items() if s in VALUES]
    head = _head(rng, attributes)
    pieces += [head] if head.slot else []
    rng.shuffle(pieces)
    comma = rng.random() < 0.5
    spaced: list[_Piece] = []
    for i, piece in enumerate(pieces):
        spaced += [_Piece(","), piece] if comma and i else [piece]
    return spaced


def _relative(rng: random.Random, attributes: dict[str, str]) -> list[_Piece]:
    """Word the attributes with a clause: "a scarf that is red and woollen, for winter"."""
    head = _head(rng, attributes)
    before, after = _split_slots(rng, attributes)
    pieces = [head]
    if head.text not in UNCOUNTED:
        pieces.insert(0, _Piece(_article(rng, head.text)))
    for i, piece in enumerate(before):
        joint = rng.choice(("that is", "which is")) if i == 0 else "and"
        pieces += [_Piece(joint), piece]
    for piece in after:
        pieces += [_Piece(rng.choice((",", "and")))] if rng.random() < 0.3 else []
        pieces.append(piece)
    return pieces


def _specification(rng: random.Random, attributes: dict[str, str]) -> list[_Piece]:
    """Word the attributes as a specification: "scarf. colour: red. material: wool"."""
    pieces = [_head(rng, attributes)]
    slots = [slot for slot in ADJECTIVE_ORDER if slot in attributes]
    rng.shuffle(slots)
    mark = rng.choice((".", ",", ";", " -"))
    for slot in slots:
        pieces.append(_Piece(mark))
        name = SPEC_NAMES.get(slot)
        pieces += [_Piece(name), _Piece(":")] if name else []
        pieces.append(_attribute(rng, slot, attributes[slot], name is None))
    return pieces


_Wording = Callable[[random.Random, dict[str, str]], list[_Piece]]
_QUERY_WORDINGS: tuple[_Wording, ...] = (_noun_phrase, _noun_phrase, _keywords, _relative)
_ITEM_WORDINGS: tuple[_Wording, ...] = (
    _noun_phrase,
    _noun_phrase,
    _noun_phrase,
    _keywords,
    _relative,
    _specification,
)


def _query_text(rng: random.Random, requested: dict[str, str]) -> str:
    text = _join(rng.choice(_QUERY_WORDINGS)(rng, requested))[0]
    if rng.random() < 0.5:
        text = f"{rng.choice(ASKING)} {text}"
    text += rng.choice(("", "", "", ".", "?", "!", " please"))
    text = _recase(rng, text)
    if rng.random() < 0.12:
        text = _surround(rng, text, [rng.choice(QUERY_FILLER)])
    return text


def _item_text(rng: random.Random, attributes: dict[str, str], chatty: bool) -> Item:
    pieces = rng.choice(_ITEM_WORDINGS)(rng, attributes)
    if rng.random() < 0.15:
        pieces.insert(0, _Piece(rng.choice(ITEM_OPENING)))
    extras = rng.randint(2, 5) if chatty else int(rng.random() < 0.2)
    for filler in rng.sample(ITEM_FILLER, extras):
        pieces += [_Piece(rng.choice((",", ".", " -"))), _Piece(filler)]
    if rng.random() < 0.45:
        pieces.append(_Piece(rng.choice((".", ".", ".", "!"))))
    item = _stating(pieces)
    return Item(_recase(rng, item.text), item.statements)


def _stating(pieces: Sequence[_Piece]) -> Item:
    text, ends = _join(pieces)
    stated = [
        Statement(end, piece.slot, piece.value)
        for piece, end in zip(pieces, ends, strict=True)
        if piece.slot
    ]
    return Item(text, tuple(stated))


def _join(pieces: Sequence[_Piece]) -> tuple[str, list[int]]:
    """Join pieces with spaces (none before punctuation); also return where each one ends."""
    text = ""
    ends: list[int] = []
    for piece in pieces:
        tight = not text or piece.text[0] in " .,;:!?"
        text += piece.text if tight else f" {piece.text}"
        ends.append(len(text))
    return text, ends


def _recase(rng: random.Random, text: str) -> str:
    """Vary capital letters; the length never changes, so offsets stay valid."""
    roll = rng.random()
    if roll < 0.45:
        return text[0].upper() + text[1:]
    if roll < 0.9:
        return text
    if roll < 0.94:
        return text.lower()
    return text.upper() if roll < 0.96 else text.title()


def _surround(rng: random.Random, text: str, sentences: Sequence[str]) -> str:
    """Put sentences before and after the request."""
    cut = rng.randint(0, len(sentences))
    middle = text if text[-1] in ".?!" or cut == len(sentences) else f"{text}."
    return " ".join((*sentences[:cut], middle, *sentences[cut:]))


def _lengthen(rng: random.Random, query: Query) -> tuple[Query, str]:
    """Make the prompt long: filler around the request, a preamble before it, or both."""
    preamble = ""
    if rng.random() < 0.6:
        preamble = draw_preamble(rng, rng.randint(3, 16))
    if not preamble or rng.random() < 0.2:
        sentences = rng.sample(QUERY_FILLER, rng.randint(2, 8))
        sentences += [neutral_sentence(rng) for _ in range(rng.randint(0, 8))]
        rng.shuffle(sentences)
        query = Query(query.requested, _surround(rng, query.text, sentences))
    return query, preamble


def draw_preamble(rng: random.Random, count: int) -> str:
    sentences = rng.sample(INSTRUCTIONS, min(count, rng.randint(2, 12)))
    sentences += [neutral_sentence(rng) for _ in range(count - len(sentences))]
    if rng.random() < 0.25:
        # The model must learn to ignore attribute words outside the query.
        sentences.append(f"The last customer wanted {_join(_noun_phrase(rng, _other(rng)))[0]}.")
    if rng.random() < 0.5:
        rng.shuffle(sentences)
    return " ".join(sentences)


def _other(rng: random.Random) -> dict[str, str]:
    return dict(_draw_request(rng, rng.randint(1, 3)))


def neutral_sentence(rng: random.Random) -> str:
    words: list[str] = []
    for _ in range(rng.randint(3, 8)):
        words += [rng.choice(JOINING_WORDS), rng.choice(NEUTRAL_WORDS)]
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}."
