"""A scoring request and its result, as the engine takes and returns them."""

from dataclasses import dataclass

from gpuscore.arrays import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One request after the cut: every prompt is `query_ids + item_ids[i]`.

    `query_ids` holds the tokens before the cut, which all prompts share. Each item has at least one
    token, so that every scored row is computed. `label_ids[i]` belongs to `item_ids[i]`.

    With `every_position` every token of an item is scored, each for one label of its own, so
    `label_ids[i]` is as long as `item_ids[i]`. There is no query then, because a cached prefix has
    no rows that could be scored.

    Raises:
        ValueError: with `every_position`, there is a query, or an item has a different number of
            labels than tokens.
    """

    query_ids: Int32Array  # [cut], may be empty
    item_ids: tuple[Int32Array, ...]  # each [>= 1]
    label_ids: tuple[Int32Array, ...]  # one per item, each [>= 1]
    need_lse: bool
    need_top: bool = False
    priority: int = 0  # lower runs first
    salt: str = ""  # only requests with the same salt find each other's cached prefixes
    deadline: float | None = None  # seconds on the engine's clock; work not started then is dropped
    every_position: bool = False

    def __post_init__(self) -> None:
        if self.every_position and (
            len(self.query_ids) or [*map(len, self.item_ids)] != [*map(len, self.label_ids)]
        ):
            raise ValueError("every position needs one label for each token, and no query")

    @property
    def num_rows(self) -> int:
        """Number of scored rows: one per item, or one per item token with `every_position`."""
        return sum(map(len, self.item_ids)) if self.every_position else len(self.item_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute if nothing is cached: the query once, and all items."""
        return len(self.query_ids) + sum(map(len, self.item_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """Sum of the lengths of all prompts; the query counts once per item."""
        return len(self.query_ids) * len(self.item_ids) + sum(map(len, self.item_ids))


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in the engine, in three consecutive stages."""

    queue: float  # from its arrival until its first batch was chosen
    batch: float  # from then until that batch was laid out and launched
    device: float  # from then until its last result was collected


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Logits at the last token of each prompt, in item order, float32.

    `label_logits[i][j]` is the logit of label j of item i. `lse[i]` is the log-sum-exp of item i's
    logits over the full vocabulary, or over all classes, so log-probability = logit - lse; it is
    None unless asked for. The N rows are the items. With `every_position` the rows are all tokens
    of all items, one item after the other, and label j of an item belongs to its token j.
    """

    label_logits: tuple[Float32Array, ...]
    lse: Float32Array | None  # [N]
    top_ids: Int32Array | None  # [N] the most probable tokens, the lowest on a tie ...
    top_logits: Float32Array | None  # [N] ... and their logits, from the logits that `lse` sums
    computed_tokens: int
    timings: Timings
