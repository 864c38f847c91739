"""The clients, blocking and for asyncio."""

from collections.abc import Iterable, Sequence
from typing import Unpack

from gpuscore.client.options import (
    ClassifyRequestOptions,
    FamilyRequestOptions,
    PromptRequestOptions,
    ScoreRequestOptions,
)
from gpuscore.client.results import (
    ClassifyResponse,
    CompletionsResponse,
    PairsResponse,
    RerankResponse,
    ScoreResponse,
)
from gpuscore.client.scores import (
    classify_call,
    completions_call,
    pairs_call,
    rerank_call,
    score_call,
)
from gpuscore.client.sending import AsyncSender, Sender
from gpuscore.types.call_arguments import Ids, Items, Text, awaited, takes_options
from gpuscore.types.results import Document


class Client(Sender):
    """A client of one gpuscore server. It is a context manager; threads may share it.

    429, 502, 503 and connection errors are retried, up to `max_attempts` attempts in all, not
    before the server's Retry-After and not after the call's `deadline`. Other errors are not
    retried. Lists that are too long for one request are split by number and by bytes, and their
    answers are joined to one result.

    All calls take `RequestOptions`, too. They raise a ClientError: StatusError, ConnectionFailed or
    BadAnswer; InvalidRequest for an argument that is neither text nor token ids; and TypeError for
    an option that does not exist.

    Args:
        url: such as http://127.0.0.1:8000, with a path if the server has a prefix.
        api_key: sent as bearer token.
        http: the caller's own httpx.Client, for proxies or certificates; it is not closed.
        **options: see `ClientOptions`.

    Raises:
        ValueError: an option is out of range, or the URL is invalid.
    """

    @takes_options
    def score(
        self, query: Text, items: Items, **options: Unpack[ScoreRequestOptions]
    ) -> ScoreResponse:
        """Return the labels' probabilities after each `query + item` prompt; see `Scorer.score`.

        Args:
            query: the text or token ids that all items share.
            items: texts if the query is a text, lists of token ids if it is one.
            **options: see `ScoreOptions` and `RequestOptions`.

        Raises:
            ClientError: as all calls.
            ValueError: there are lists of labels, but not one for each item.
        """
        return self._do(score_call(self._settings.limits, query, items, options))

    @takes_options
    def rerank(
        self,
        query: str,
        documents: Iterable[Document],
        top_n: int | None = None,
        *,
        rank_fields: Sequence[str] | None = None,
        **options: Unpack[FamilyRequestOptions],
    ) -> RerankResponse:
        """Rank documents by relevance to a query, best first; see `Scorer.rerank`.

        Args:
            query: the text to rank by.
            documents: texts, or mappings with `text` or with `rank_fields`.
            top_n: number of best documents, of the whole list even if it is split; None: all.
            rank_fields: the fields to rank by, for documents that are mappings.
            **options: see `FamilyOptions` and `RequestOptions`.
        """
        limits = self._settings.limits
        return self._do(rerank_call(limits, query, documents, top_n, rank_fields, options))

    @takes_options
    def score_pairs(
        self, pairs: Iterable[tuple[str, str]], **options: Unpack[FamilyRequestOptions]
    ) -> PairsResponse:
        """Score pairs of a query and a document; see `Scorer.score_pairs`.

        Args:
            pairs: queries and documents.
            **options: see `FamilyOptions` and `RequestOptions`.
        """
        return self._do(pairs_call(self._settings.limits, pairs, options))

    @takes_options
    def classify(
        self, texts: str | Iterable[str], **options: Unpack[ClassifyRequestOptions]
    ) -> ClassifyResponse:
        """Return the probability of each class; see `Scorer.classify`.

        Args:
            texts: texts to judge, or whole prompts.
            **options: see `ClassifyOptions` and `RequestOptions`.
        """
        return self._do(classify_call(self._settings.limits, texts, options))

    @takes_options
    def completions(
        self,
        prompts: str | Ids | Iterable[str] | Iterable[Ids],
        **options: Unpack[PromptRequestOptions],
    ) -> CompletionsResponse:
        """Return the log-probabilities of prompts, as POST /v1/completions does; generates nothing.

        Args:
            prompts: texts or lists of token ids; a text or a list of ids is one prompt.
            **options: see `PromptOptions` and `RequestOptions`.
        """
        return self._do(completions_call(self._settings.limits, prompts, options))


class AsyncClient(AsyncSender):
    """`Client` for asyncio: same arguments (`http` is an httpx.AsyncClient), results and errors.

    Tasks may share it. Cancelling a call closes its requests, and the server drops their work.
    """

    score = awaited(Client.score)
    rerank = awaited(Client.rerank)
    score_pairs = awaited(Client.score_pairs)
    classify = awaited(Client.classify)
    completions = awaited(Client.completions)
