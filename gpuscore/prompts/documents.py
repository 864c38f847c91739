"""Building a `ScoreRequest` from queries and documents, with the prompts of a family."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gpuscore.arrays import Float64Array, Int32Array
from gpuscore.errors import ConfigError, InvalidRequest, PromptTooLong
from gpuscore.prompts.family import DOCUMENT, INSTRUCTION, QUERY, PromptFamily, fields_of, filled
from gpuscore.request import ScoreRequest, ScoreResult
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.pieces import OverLimit, beside
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.turns import ALONE, Turns

# Tokens kept free: a document that is cut may be tokenised differently beside the prompt's text.
SPARE = 4


@dataclass(frozen=True, slots=True)
class RerankInput:
    """A caller's query and documents.

    Args:
        query: one query for all documents, one for each, or None for guards.
        documents: at least one.
        instruction: replaces the family's own.
        most_tokens: number of tokens after which a document is cut; None: not cut.
        fit: cut documents so that their prompts fit the model's context.
        priority: of the request; a lower value runs first.
        need_lse: ask for the log-sum-exp over the vocabulary.
        name: the caller's name for the documents, for errors.
        query_name: the caller's name for the query, for errors.
    """

    query: str | Sequence[str] | None
    documents: Sequence[str]
    instruction: str | None = None
    most_tokens: int | None = None
    fit: bool = False
    priority: int = 0
    need_lse: bool = False
    name: str = "documents"
    query_name: str = "query"


@dataclass(frozen=True, slots=True)
class Rerank:
    """A request to the engine, with the indices of the documents that were cut."""

    request: ScoreRequest
    truncated: tuple[int, ...]


class _Template:
    """The parts of a family's prompt, split at the part with the document."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        place = next(i for i, part in enumerate(parts) if DOCUMENT in fields_of(part))
        self.before, self.last, self.after = parts[:place], parts[place], parts[place + 1 :]
        # The parts before the first caller's text.
        fixed = next(i for i, part in enumerate(parts) if fields_of(part))
        self.fixed = parts[:fixed]


class FamilyPrompts:
    """The prompts of one served model.

    Raises:
        ConfigError: on creation, if the family's labels are not tokens of the tokenizer.
    """

    def __init__(self, family: PromptFamily, builder: PromptBuilder) -> None:
        if builder.encoder is None:
            raise ConfigError(f"the model is a {family.name}, but has no tokenizer")
        self.family, self._builder = family, builder
        self._own: TextEncoder = builder.encoder
        self._foreign = builder.encoder.without_specials()
        self.label_ids = self._label_ids()
        self._template = _Template(family.parts)
        self._answering = self._template
        if family.answering_parts:
            self._answering = _Template(family.answering_parts)

    def build(
        self,
        given: RerankInput,
        turns: Turns = ALONE,
        label_ids: Sequence[Sequence[int]] | None = None,
    ) -> Rerank:
        """Return the request for these documents. Long texts take seconds.

        Args:
            given: the texts.
            turns: called before every piece of work.
            label_ids: labels of each document, in place of the family's.

        Raises:
            GpuscoreError: as `PromptBuilder.build`, and InvalidRequest for an instruction or a
                query that the family's prompt has no field for.
        """
        count = len(given.documents)
        if not count:
            raise InvalidRequest(f"{given.name} must hold at least one document", param=given.name)
        self._builder.check_count(given.name, count)
        self._check_fields(given)
        template = self._template if given.query is None else self._answering
        queries = given.query
        if isinstance(queries, str) or queries is None:
            queries = [queries or ""] * count
        if len(queries) != count:
            raise InvalidRequest(
                f"{given.query_name} has {len(queries)} texts and {given.name} has {count}; send "
                "one query, or one for each document",
                param=given.query_name,
            )
        groups = [
            (query, [index for index, _ in found])
            for query, found in groupby(enumerate(queries), key=lambda pair: pair[1])
        ]
        prompts: list[Iterator[Int32Array]] = []
        truncated: list[int] = []
        num_shared = len(self._ids(template.fixed, {}))
        for query, indices in groups:
            with self._too_long(given.query_name):
                made, shared, cut = self._of_query(given, template, query, indices, turns)
            prompts.append(made)
            truncated += cut
            if len(groups) == 1:
                num_shared = shared
        request = self._builder.from_prompts(
            (prompt for made in prompts for prompt in made),
            num_prompts=count,
            num_shared=num_shared,
            label_ids=self.label_ids if label_ids is None else label_ids,
            need_lse=given.need_lse,
            priority=given.priority,
            name=given.name,
            turns=turns,
        )
        return Rerank(request, tuple(truncated))

    def raw_scores(self, result: ScoreResult) -> Float64Array:
        """Return the raw scores [N] of the documents, in their order."""
        return self.family.raw_scores(np.stack(result.label_logits).astype(np.float64))

    def _check_fields(self, given: RerankInput) -> None:
        name = self.family.name
        if given.instruction is not None and not self.family.takes_instruction:
            raise InvalidRequest(f"prompts of {name} have no instruction", param="instruction")
        template = self._template if given.query is None else self._answering
        has_query = any(QUERY in fields_of(part) for part in (*template.before, template.last))
        if has_query and given.query is None:
            raise InvalidRequest(f"prompts of {name} need a query", param=given.query_name)
        if given.query is not None and not has_query:
            raise InvalidRequest(f"prompts of {name} have no query", param=given.query_name)

    def _of_query(
        self,
        given: RerankInput,
        template: _Template,
        query: str,
        indices: list[int],
        turns: Turns,
    ) -> tuple[Iterator[Int32Array], int, list[int]]:
        """Make the prompts of one query's documents.

        Returns:
            The prompts; the number of first tokens that all of them share, known from the query
            alone; and the indices of the documents that were cut.
        """
        own = self.family.instruction
        values = {
            QUERY: self.family.text(query),
            INSTRUCTION: own if given.instruction is None else given.instruction,
        }
        shared = self._ids(template.before, values, turns)
        closing = self._ids(template.after, values, turns)
        head, _, tail = template.last.partition("{" + DOCUMENT + "}")
        head, tail = filled(head, **values), filled(tail, **values)
        around = len(shared) + len(closing)
        whole = [self.family.text(given.documents[index]) for index in indices]
        documents = self._cut(given, whole, around, head + tail, turns)
        pairs = zip(indices, whole, documents, strict=True)
        truncated = [index for index, long, short in pairs if long != short]
        prompts = self._joined(shared, head, (f"{d}{tail}" for d in documents), closing, turns)
        num_shared = self._foreign.num_shared(head, turns, self._limit)
        return prompts, len(shared) + num_shared, truncated

    def _joined(
        self,
        shared: Int32Array,
        head: str,
        texts: Iterable[str],
        closing: Int32Array,
        turns: Turns,
    ) -> Iterator[Int32Array]:
        """Yield prompts: the shared ids, the ids of head + text, and the closing ids."""
        with beside(len(shared) + len(closing), self._limit) as left:
            for middle in self._foreign.joined(head, texts, False, turns, left):
                yield np.concatenate((shared, middle, closing))

    @property
    def _limit(self) -> int:
        return self._builder.backend.max_model_len

    @contextmanager
    def _too_long(self, query_name: str) -> Iterator[None]:
        """Raise OverLimit, for the text before the documents, as PromptTooLong."""
        try:
            yield
        except OverLimit as over:
            raise PromptTooLong(
                f"{query_name} gives prompts of at least {over.least} tokens, "
                f"the limit is {self._limit}",
                param=query_name,
            ) from None

    def _label_ids(self) -> list[int]:
        family = self.family
        # A label follows the prompt's last part and must not merge with it into one token.
        closing = "" if fields_of(family.parts[-1]) else filled(family.parts[-1])
        found = [
            label if isinstance(label, int) else self._label_id(label, closing)
            for label in family.labels
        ]
        rows = self._builder.backend.label_rows
        if found and max(found) >= rows:
            raise ConfigError(
                f"{family.name} reads the logit of {max(found)}; the model has 0 to {rows - 1}"
            )
        if len(set(found)) < len(found):
            raise ConfigError(
                f"labels of {family.name} begin with the same token of this tokenizer: {found}"
            )
        return found

    def _label_id(self, label: str, closing: str) -> int:
        before = self._own.plain_ids(closing) if closing else np.empty(0, np.int32)
        ids = self._own.plain_ids(closing + label)
        tokens = ids[len(before) :].tolist()
        apart = np.array_equal(ids[: len(before)], before)
        if not apart or not tokens or (len(tokens) > 1 and not self.family.first_tokens):
            raise ConfigError(
                f"the answer {label!r} to prompts of {self.family.name} must be one token; with "
                f"this tokenizer it is {tokens if apart else 'part of another token'}"
            )
        first: int = tokens[0]
        return first

    def _ids(
        self, parts: Iterable[str], values: dict[str, str], turns: Turns = ALONE
    ) -> Int32Array:
        found = [np.empty(0, np.int32)]
        for part in parts:
            encoder = self._foreign if fields_of(part) else self._own
            found.append(encoder.plain_ids(filled(part, **values), turns, self._limit))
        return np.concatenate(found)

    def _cut(
        self,
        given: RerankInput,
        documents: list[str],
        around: int,
        own: str,
        turns: Turns,
    ) -> list[str]:
        """Cut the documents as the caller asks.

        Args:
            given: has the caller's limits.
            documents: the whole texts.
            around: number of tokens in the parts before and after the document's part.
            own: the text beside the document in its own part.
            turns: called before every piece of work.
        """
        most = given.most_tokens
        if given.fit:
            room = self._limit - around
            room -= len(self._foreign.plain_ids(own, turns, self._limit)) + SPARE
            if room < 1:
                raise PromptTooLong(
                    f"the query leaves no room for a document, the limit is {self._limit} tokens",
                    param=given.query_name,
                )
            most = room if most is None else min(most, room)
        if most is None:
            return documents
        return [self._foreign.first_tokens(document, most, turns) for document in documents]
