"""Building a `ScoreRequest` from queries and documents, with the prompts of a family."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, islice, repeat

import numpy as np

from gpuscore.errors import ConfigError, InvalidRequest, PromptTooLong
from gpuscore.prompts.family import (
    DOCUMENT,
    INSTRUCTION,
    QUERY,
    DocumentTemplate,
    PromptFamily,
    fields_of,
    filled,
)
from gpuscore.prompts.rerank_input import (
    DocumentTruncator,
    Rerank,
    RerankInput,
    prompts_of,
)
from gpuscore.text.boundaries import OverLimit, limit_without
from gpuscore.text.controls import ControlToken, refused_controls
from gpuscore.text.joining import PromptBuilder, Prompts
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import NO_TOKENS, Float64Array, Int32Array
from gpuscore.types.item_errors import ItemErrors, ItemsRefused
from gpuscore.types.request import ScoreResult


class FamilyPrompts:
    """The prompts of one served model.

    Raises:
        ConfigError: on creation, if the family's labels are not tokens of the tokenizer.
    """

    def __init__(self, family: PromptFamily, builder: PromptBuilder) -> None:
        if builder.encoder is None:
            raise ConfigError(f"the model is a {family.name}, but has no tokenizer")
        self.family = family
        self._builder = builder
        self._encoder: TextEncoder = builder.encoder
        parts = (*family.parts, *family.answering_parts)
        fixed = [self._encoder.plain_ids(filled(part)) for part in parts if not fields_of(part)]
        fixed_ids = np.concatenate([NO_TOKENS, *fixed]).tolist()
        self._caller_encoder = self._encoder.for_callers(fixed_ids)
        self._check_frame(part for part in parts if fields_of(part))
        self.label_ids = self._label_ids()
        self._template = DocumentTemplate(family.parts, family.strip)
        self._answering = self._template
        if family.answering_parts:
            self._answering = DocumentTemplate(family.answering_parts, family.answering_strip)

    @property
    def fixed_tokens(self) -> int:
        """Number of tokens before the first text of a caller."""
        return len(self._ids(self._template.fixed, {}))

    def build(self, inputs: RerankInput, errors: ItemErrors | None = None) -> Rerank:
        """Return the request for the documents without errors. Long texts take seconds.

        Args:
            inputs: the texts.
            errors: gets the error of each document that cannot be scored, or whose query cannot;
                documents that have errors already are not read. None: the first error is raised.

        Raises:
            GpuscoreError: like `PromptBuilder.build`; also InvalidRequest for an instruction or a
                query that the family's prompt has no field for.
        """
        if errors is None:
            return self._build(inputs, None)
        inputs = inputs.checked(errors)
        try:
            return self._build(inputs, errors)
        except ItemsRefused:
            rest = inputs.without(errors)
        if not rest.documents:
            self._check_query(inputs)
            return Rerank(None, ())
        built = self._build(rest, None)
        places = errors.rest(range(len(inputs.documents)))
        return replace(built, truncated=tuple(places[index] for index in built.truncated))

    def _build(
        self,
        inputs: RerankInput,
        errors: ItemErrors | None,
    ) -> Rerank:
        """Return the request; raise ItemsRefused once every document has an error in `errors`."""
        if not inputs.documents:
            raise InvalidRequest(
                f"{inputs.name} must hold at least one document", param=inputs.name
            )
        self._builder.check_count(inputs.name, len(inputs.documents))
        self._check_fields(inputs)
        queries = inputs.queries
        if len(queries) != len(inputs.documents):
            raise InvalidRequest(
                f"{inputs.query_name} has {len(queries)} texts and {inputs.name} has "
                f"{len(inputs.documents)}; send one query, or one for each document",
                param=inputs.query_name,
            )
        groups = [
            (query, [index for index, _ in numbered])
            for query, numbered in groupby(enumerate(queries), key=lambda pair: pair[1])
        ]
        truncated: list[int] = []
        built = [
            self._group(inputs, query, indices, truncated=truncated, errors=errors)
            for query, indices in groups
        ]
        num_shared = built[0].num_shared
        # Bits depend on a pair's prefix length, which must not depend on other pairs' queries.
        fixed = self._builder.backend.deterministic_chunk and isinstance(inputs.query, list)
        if len(groups) > 1 or fixed:
            template = self._template if inputs.query is None else self._answering
            num_shared = len(self._ids(template.fixed, {}))
        count = len(inputs.documents)
        prompts = Prompts(partial(prompts_of, built), count, num_shared, inputs.name)
        request = self._builder.from_prompts(
            prompts, self.label_ids, inputs.terms, need_lse=inputs.need_lse, errors=errors
        )
        return Rerank(request, tuple(truncated))

    def raw_scores(self, result: ScoreResult) -> Float64Array:
        """Return the raw scores [N] of the documents, in their order."""
        return self.family.raw_scores(np.stack(result.label_logits).astype(np.float64))

    def _check_fields(self, inputs: RerankInput) -> None:
        name = self.family.name
        if inputs.instruction is not None and not self.family.takes_instruction:
            raise InvalidRequest(
                f"prompts of {name} have no instruction", param=inputs.instruction_name
            )
        template = self._template if inputs.query is None else self._answering
        every = (*template.before, template.last, *template.after)
        has_query = any(QUERY in fields_of(part) for part in every)
        if has_query and inputs.query is None:
            raise InvalidRequest(f"prompts of {name} need a query", param=inputs.query_name)
        if inputs.query is not None and not has_query:
            raise InvalidRequest(f"prompts of {name} have no query", param=inputs.query_name)

    def _check_query(self, inputs: RerankInput) -> None:
        """Raise PromptTooLong with the query's name if the query alone is too long."""
        if not isinstance(inputs.query, str):
            return
        try:
            self._build(replace(inputs, documents=[""], most_tokens=None), None)
        except PromptTooLong as error:
            message = error.message.replace(f"{inputs.name}[0]", f"{inputs.query_name} alone")
            raise PromptTooLong(message, param=inputs.query_name) from None

    def _group(
        self,
        inputs: RerankInput,
        query: str,
        indices: list[int],
        truncated: list[int],
        errors: ItemErrors | None,
    ) -> Prompts:
        """Make the prompts of neighbouring documents that have the same query, and add the indices
        of those that are cut to `truncated`.

        If the query alone is too long, its documents get the error; if it is the query of all
        documents, the error is raised.
        """
        try:
            return self._of_query(inputs, query, indices, truncated)
        except OverLimit as over:
            error = PromptTooLong(
                f"{inputs.query_name} gives prompts of at least {over.least} tokens, "
                f"the limit is {self._limit}",
                param=inputs.query_name,
            )
        except PromptTooLong as no_room:
            error = no_room
        if errors is None or isinstance(inputs.query, str):
            raise error
        for index in indices:
            errors.add(index, error)
        count = len(indices)  # empty prompts stand in the place of those that cannot be made
        return Prompts(lambda start: repeat(NO_TOKENS, count - start), count, 0, inputs.name)

    def _of_query(
        self, inputs: RerankInput, query: str, indices: list[int], truncated: list[int]
    ) -> Prompts:
        template = self._template if inputs.query is None else self._answering
        instruction = self.family.instruction if inputs.instruction is None else inputs.instruction
        values = {
            QUERY: template.text(QUERY, query),
            INSTRUCTION: template.text(INSTRUCTION, instruction),
        }
        with refused_controls(inputs.query_name):
            shared = self._ids(template.before, values)
            closing = self._ids(template.after, values, begun=True)
        while len(closing) and closing[-1] == self.family.padding:
            closing = closing[:-1]
        encoder = self._caller_encoder.continuing if template.before else self._caller_encoder
        head, _, tail = template.last.partition("{" + DOCUMENT + "}")
        head = filled(head, **values)
        tail = filled(tail, **values)
        around = len(shared) + len(closing)
        whole = [template.text(DOCUMENT, inputs.documents[index]) for index in indices]
        documents = self._truncate(inputs, whole, around, encoder=encoder, texts=(head, tail))
        with refused_controls(inputs.query_name):
            num_shared = len(shared) + encoder.num_shared(head, self._limit)
        pairs = zip(indices, whole, documents, strict=True)
        truncated += [index for index, long, short in pairs if long != short]

        def texts(start: int) -> Iterator[str]:
            return (f"{document}{tail}" for document in islice(documents, start, None))

        joined = encoder.joined(head, texts, False, self._limit - around)

        def prompts(start: int) -> Iterator[Int32Array]:
            places = (f"{inputs.name}[{index}]" for index in indices[start:])
            middles = joined(start)
            with limit_without(around, self._limit):
                while True:
                    middle = self._next(middles, (head, tail), next(places, ""), inputs)
                    if middle is None:
                        break
                    yield np.concatenate((shared, middle, closing))

        return Prompts(prompts, len(indices), num_shared, inputs.name)

    def _next(
        self,
        middles: Iterator[Int32Array],
        around: tuple[str, str],
        place: str,
        inputs: RerankInput,
    ) -> Int32Array | None:
        """Return the part of the prompt with the next document, or None after the last.

        Raises:
            InvalidRequest: a text needs a control token; names the query if the text around the
                documents needs it.
        """
        try:
            with refused_controls(place):
                return next(middles, None)
        except InvalidRequest:
            with refused_controls(inputs.query_name):
                for text in around:
                    self._caller_encoder.plain_ids(text)
            raise

    def _check_frame(self, parts: Iterable[str]) -> None:
        """Raise ConfigError if the family's own text beside a caller's needs a control token."""
        try:
            self._ids(parts, dict.fromkeys((INSTRUCTION, QUERY, DOCUMENT), ""))
        except ControlToken as error:
            raise ConfigError(
                f"prompts of {self.family.name} need {error.args[0]!r} beside the texts of "
                "callers, and it is a control token of this tokenizer"
            ) from error

    @property
    def _limit(self) -> int:
        return self._builder.backend.max_model_len

    def _label_ids(self) -> list[int]:
        family = self.family
        # A label follows the prompt's last part and must not merge with it into one token.
        ids = [
            label if isinstance(label, int) else self._label_id(label) for label in family.labels
        ]
        rows = self._builder.backend.label_rows
        if ids and max(ids) >= rows:
            raise ConfigError(
                f"{family.name} reads the logit of {max(ids)}; the model has 0 to {rows - 1}"
            )
        if len(set(ids)) < len(ids):
            raise ConfigError(
                f"labels of {family.name} begin with the same token of this tokenizer: {ids}"
            )
        return ids

    def _label_id(self, label: str) -> int:
        """Return the first token of a label after the prompt; raise ConfigError if the label merges
        with the prompt, or if a reranker's label has more tokens.
        """
        last = self.family.parts[-1]  # with fields it differs from prompt to prompt
        closing = "" if fields_of(last) else filled(last)
        encoder = self._encoder.continuing if len(self.family.parts) > 1 else self._encoder
        before = encoder.plain_ids(closing) if closing else NO_TOKENS
        ids = encoder.plain_ids(closing + label)
        tokens = ids[len(before) :].tolist()
        if not tokens or not np.array_equal(ids[: len(before)], before):
            raise ConfigError(
                f"the answer {label!r} to prompts of {self.family.name} must be one token; with "
                "this tokenizer it is part of another token"
            )
        if len(tokens) > 1 and self.family.ranks:
            raise ConfigError(
                f"the answer {label!r} to prompts of {self.family.name} must be one token; with "
                f"this tokenizer it is {tokens}"
            )
        first: int = tokens[0]
        return first

    def _ids(
        self,
        parts: Iterable[str],
        values: dict[str, str],
        begun: bool = False,
    ) -> Int32Array:
        """Return the ids of parts; they begin the prompt unless it has begun."""
        arrays = [NO_TOKENS]
        for part in parts:
            encoder = self._caller_encoder if fields_of(part) else self._encoder
            if begun or len(arrays) > 1:
                encoder = encoder.continuing
            arrays.append(encoder.plain_ids(filled(part, **values), self._limit))
        return np.concatenate(arrays)

    def _truncate(
        self,
        inputs: RerankInput,
        documents: list[str],
        around: int,
        encoder: TextEncoder,
        texts: tuple[str, str],
    ) -> list[str]:
        """Truncate the documents as the request says.

        Args:
            inputs: has the caller's limits.
            documents: the texts.
            around: number of tokens in the parts before and after the document's part.
            encoder: encodes the part with the document.
            texts: the texts before and after the document in that part.
        """
        if (most := inputs.most_tokens) is not None:
            documents = [self._caller_encoder.first_tokens(text, most) for text in documents]
        if not inputs.fit:
            return documents
        with refused_controls(inputs.query_name):
            truncator = DocumentTruncator(encoder, *texts, self._limit - around)
        shortened = [short for text in documents if (short := truncator.truncate(text)) is not None]
        if len(shortened) < len(documents):
            raise PromptTooLong(
                f"the query leaves no room for a document, the limit is {self._limit} tokens",
                param=inputs.query_name,
            )
        return shortened
