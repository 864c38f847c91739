"""Workloads: fixed sets of requests, made from a seed and the model's files alone, or from the
shipped file of real sentences."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gpuscore.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Case:
    """One request as a caller sends it, with the ids of its labels and prompts."""

    name: str
    query: str | Ids
    items: Sequence[str | Ids]
    label_ids: list[Ids]  # one list per item
    labels: list[str] | None = None  # the same labels as text, if they are sent as text
    item_first: bool = False
    apply_softmax: bool = False
    temperature: float = 1.0
    # Whole prompts as ids, made by the tokenizer itself, not by the code under test.
    prompts: list[Ids] | None = None  # None: query and items are ids, see `prompt_ids`

    @property
    def same_labels(self) -> bool:
        return all(ids == self.label_ids[0] for ids in self.label_ids)

    def prompt_ids(self) -> list[Ids]:
        """Return the ids of every whole prompt."""
        if self.prompts is not None:
            return self.prompts
        query: Any = self.query  # ids, as the items are
        items: Sequence[Any] = self.items
        return [[*item, *query] if self.item_first else [*query, *item] for item in items]


@dataclass(frozen=True, slots=True)
class Workload:
    """The cases, and the arguments from which they were made."""

    size: str
    seed: int
    vocab_rows: int
    context: int
    cases: tuple[Case, ...]

    @property
    def num_items(self) -> int:
        return sum(len(case.items) for case in self.cases)

    @property
    def digest(self) -> str:
        """The SHA-256 of the workload, equal on all machines for equal requests."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    @property
    def named(self) -> str:
        """The size with the seed, as text."""
        return TEXT if self.size == TEXT else f"{self.size}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a workload, in tokens."""

    long_query: int  # of the case "long"
    query: int  # of the case "500 items"; further queries are no longer
    item: int  # of the case "500 items"; further queries' items are at most twice as long


SIZES = {
    "quick": Size(120, 30, 6),
    "standard": Size(1900, 256, 20),
    "full": Size(7600, 2000, 20),
}
# The sample that `gpuscore bench` scores, whatever the model's context is.
SAMPLE = "bench"
SAMPLE_IDS = 30_000
SAMPLE_CONTEXT = 512
SAMPLE_CASES = ("short", "shared sub-prefixes", "query 1", "query 2", "query 3")
TEXT = "text"  # the workload of real sentences; used in place of a size
MANY = 500
QUERIES = 24  # further random queries
ITEMS = 12  # items of each further query
SHORTEST_QUERY = 8  # tokens of the shortest further query
LENGTHS = 8  # number of different lengths of further queries
LONGEST_ITEM = 64
SPARE = LONGEST_ITEM + 1  # tokens of the context that no query uses
# Questions, each with sentences of this project's documentation; some sentences answer it.
SENTENCES = Path(__file__).with_name("sentences.jsonl")
# The labels for real sentences are the first two of these that are one token each.
ANSWERS = (" yes", " no", "yes", "no", "Yes", "No")
INSTRUCTION = "Does the sentence answer the question? Answer yes or no.\n"
BEFORE = INSTRUCTION + "Question: {}\nSentence: "
AFTER = "\nAnswer:"
PAGE = 48  # sentences of the long query
LONG_LIST = 120  # items of one ranking


def make_workload(
    size: str, seed: int, vocab_rows: int, context: int, tokenizer: "Tokenizer | None"
) -> Workload:
    """Make the requests for one model.

    Args:
        size: a name of `SIZES`, or `TEXT`, or `SAMPLE`.
        seed: draws the random token ids; 0 for `TEXT` and `SAMPLE`, which have none.
        vocab_rows: valid ids are 0 <= id < vocab_rows.
        context: largest number of tokens of a prompt.
        tokenizer: the model's, or None; only `TEXT` needs it.

    Raises:
        ConfigError: the model is too small for any workload, or has no tokenizer for `TEXT`, or the
            seed is out of range.
    """
    if size in (TEXT, SAMPLE) and seed:
        raise ConfigError(
            f"--seed {seed} draws token ids, but those of --workload {size} are fixed; add "
            f"--workload {', '.join(SIZES)}"
        )
    if size == SAMPLE:
        return sample(vocab_rows)
    if size == TEXT:
        cases = _sentence_cases(tokenizer, vocab_rows, context)
        return Workload(size, seed, vocab_rows, context, cases=cases)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed} must be from 0 to {2**32 - 1}")
    if vocab_rows < 16 or context < 2 * SPARE:
        raise ConfigError(
            f"a model of {vocab_rows} token ids and a context of {context} is too small for this "
            f"workload; it needs 16 and {2 * SPARE}"
        )
    ids = _IdCases(np.random.RandomState(seed), SIZES[size], vocab_rows, context).all()
    return Workload(size, seed, vocab_rows, context, cases=ids)


def sample(vocab_rows: int) -> Workload:
    """Return the sample of `gpuscore bench`: a few requests of ids that most models have."""
    rows = min(vocab_rows, SAMPLE_IDS)
    every = make_workload("quick", 0, rows, SAMPLE_CONTEXT, tokenizer=None).cases
    chosen = tuple(case for case in every if case.name in SAMPLE_CASES)
    return Workload(SAMPLE, 0, rows, SAMPLE_CONTEXT, cases=chosen)


def query_numbers(cases: Sequence[Case]) -> dict[str, int]:
    """Return the number of each case's query, by the case's name; equal queries have one number."""
    numbers: dict[str, int] = {}
    number_of = {}
    for case in cases:
        number_of[case.name] = numbers.setdefault(repr(case.query), len(numbers))
    return number_of


class QueryTexts(msgspec.Struct, frozen=True):
    """A query and the items to be scored after it."""

    query: str
    items: list[str]


def read_texts(path: Path, name: str) -> list[QueryTexts]:
    """Read a file of JSON lines with `query` and `items`; lines without items are left out.

    Raises:
        UsageError: it cannot be read; `name` and the line's number are part of the message.
    """
    decode = msgspec.json.Decoder(QueryTexts).decode
    texts = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{name} {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{name} {path}, line {number}: {error}") from error
        if entry.items:
            texts.append(entry)
    if not texts:
        raise UsageError(f"{name} {path}: no line has items")
    return texts


def read_tokenizer(directory: Path) -> "Tokenizer | None":
    """Return the model's tokenizer without truncation and padding, or None if there is none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _IdCases:
    """The cases of random token ids; items differ, because equal ones would hide leaks.

    RandomState is NumPy's only generator whose numbers never change between releases (NEP 19).
    """

    def __init__(self, rng: np.random.RandomState, size: Size, vocab: int, context: int) -> None:
        self.rng = rng
        self.size = size
        self.vocab = vocab
        self.context = context
        self.labels = [int(id) for id in rng.choice(vocab, 3, replace=False)]

    def all(self) -> tuple[Case, ...]:
        """Return all cases; their order must not change, because it decides the random numbers."""
        short = self._ids(12)
        long = self._ids(min(self.size.long_query, self.context - SPARE))
        many = self._ids(min(self.size.query, self.context - SPARE))
        first, second, third = self.labels
        ragged = [[first], [second, second, third], [self.vocab - 1, 0]]
        some = [self._ids(n) for n in (5, 1, 9, 4, 4, 17, 2, 8, 3, 6, 11, 7)]
        return (
            self._case("short", short, [self._ids(n) for n in (1, 2, 3, 5, 8, 13, 21, 1)]),
            self._case("long", long, [self._ids(n) for n in (1, 7, 20, LONGEST_ITEM, 20, 41)]),
            self._case("500 items", many, [self._ids(self.size.item) for _ in range(MANY)]),
            self._case("shared sub-prefixes", self._ids(21), self._common_beginnings()),
            self._case("item_first", self._ids(15), some, item_first=True),
            self._case("empty items", short, [Ids(), some[2], Ids()]),
            self._case("softmax", short, some, apply_softmax=True),
            self._case("temperature", short, some, apply_softmax=True, temperature=2.5),
            self._case("labels per item", short, some[:3], labels=ragged),
            *(self._one_of_many(number) for number in range(1, QUERIES + 1)),
        )

    def _case(
        self, name: str, query: Ids, items: list[Ids], labels: list[Ids] | None = None, **how: Any
    ) -> Case:
        return Case(name, query, items, labels or [self.labels] * len(items), **how)

    def _one_of_many(self, number: int) -> Case:
        """Make a further query, so that the scores do not all depend on a few queries.

        The queries have few lengths, so that the oracle can batch prompts of equal length.
        """
        longest = min(self.size.query, self.context - SPARE)
        shortest = min(SHORTEST_QUERY, longest)
        length = shortest + (longest - shortest) * (number % LENGTHS) // (LENGTHS - 1)
        lengths = (1, self.size.item, min(2 * self.size.item, LONGEST_ITEM))
        query = self._ids(length)
        items = [self._ids(lengths[place % len(lengths)]) for place in range(ITEMS)]
        return self._case(f"query {number}", query, items)

    def _common_beginnings(self) -> list[Ids]:
        """Return items with common beginnings, an item that begins another, and two equal items."""
        long = self._ids(18)
        other = self._ids(9)
        items = [head + self._ids(1 + n) for head in (long, long[:9], other) for n in range(6)]
        return [*items, items[3]]

    def _ids(self, length: int) -> Ids:
        ids: Ids = self.rng.randint(0, self.vocab, length).tolist()
        return ids


def _sentence_cases(tokenizer: "Tokenizer | None", vocab: int, context: int) -> tuple[Case, ...]:
    """Return the cases of real sentences.

    Raises:
        ConfigError: the model has no tokenizer for them, or they do not fit.
    """
    other = f"--workload {', '.join(SIZES)} has random token ids"
    if tokenizer is None:
        raise ConfigError(f"--workload text needs a tokenizer.json; {other}")
    encoded = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in ANSWERS}
    labels = [text for text, ids in encoded.items() if len(ids) == 1 and ids[0] < vocab][:2]
    if len(labels) < 2:
        raise ConfigError(
            f"--workload text: fewer than two of {', '.join(map(repr, ANSWERS))} are one token of "
            f"this model; {other}"
        )
    texts = read_texts(SENTENCES, "sentences")
    every = [sentence for entry in texts for sentence in entry.items]
    second = texts[1].query
    page = " ".join(every[:PAGE])
    questions = [f"Question: {entry.query}{AFTER}" for entry in texts[:4]]
    before = f"{INSTRUCTION}Question: {second}{AFTER}"
    softmax = {"apply_softmax": True, "temperature": 2.5}
    drafts: list[tuple[str, str, list[str], dict[str, Any]]] = [
        *(
            (f"question {number}", BEFORE.format(entry.query), _before_answers(entry.items), {})
            for number, entry in enumerate(texts, start=1)
        ),
        ("long list", BEFORE.format(texts[0].query), _before_answers(every[:LONG_LIST]), {}),
        ("page", f"{page}\n", questions, {}),
        ("item_first", before, [f"{sentence}\n" for sentence in every[:12]], {"item_first": True}),
        ("softmax", BEFORE.format(second), _before_answers(texts[1].items), softmax),
    ]
    cases = []
    for name, query, items, how in drafts:
        pairs = ((item, query) if "item_first" in how else (query, item) for item in items)
        prompts = [list(tokenizer.encode("".join(pair)).ids) for pair in pairs]
        label_ids = [[encoded[text][0] for text in labels]] * len(items)
        cases.append(Case(name, query, items, label_ids, labels=labels, prompts=prompts, **how))
    if max(max(ids) for case in cases for ids in case.prompt_ids()) >= vocab:
        raise ConfigError(f"--workload text: the tokenizer has ids beyond the weights; {other}")
    longest = max(len(ids) for case in cases for ids in case.prompt_ids())
    if longest > context:
        raise ConfigError(
            f"--workload text: its longest request has {longest} tokens, the model's context is "
            f"{context}; {other}"
        )
    return tuple(cases)


def _before_answers(sentences: Sequence[str]) -> list[str]:
    return [sentence + AFTER for sentence in sentences]
