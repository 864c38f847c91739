"""A scoring request and its result, as the engine takes and returns them."""

from dataclasses import dataclass

from gpuscore.arrays import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One request after factoring: every prompt is `query_ids + item_ids[i]`.

    `query_ids` is what all prompts share up to the cut; each item has at least one token, so that
    every scored row is computed. `label_ids[i]` belongs to `item_ids[i]`.

    With `every_position` each token of an item is scored, for one label of its own: `label_ids[i]`
    has as many as `item_ids[i]`. Nothing is shared then, because a cached prefix has no rows.

    Raises:
        ValueError: it has a query or other numbers of labels, with `every_position`.
    """

    query_ids: Int32Array  # [cut], may be empty
    item_ids: tuple[Int32Array, ...]  # each [>= 1]
    label_ids: tuple[Int32Array, ...]  # one per item, each [>= 1]
    need_lse: bool
    need_top: bool = False
    priority: int = 0  # lower runs first
    salt: str = ""  # cached prefixes are found by requests with the same salt only
    deadline: float | None = None  # seconds on the engine's clock; what has not run then is dropped
    every_position: bool = False

    def __post_init__(self) -> None:
        if self.every_position and (
            len(self.query_ids) or [*map(len, self.item_ids)] != [*map(len, self.label_ids)]
        ):
            raise ValueError("every position needs one label for each token, and no query")

    @property
    def num_rows(self) -> int:
        """Next-token distributions that are wanted: of each item, or of each of its tokens."""
        return sum(map(len, self.item_ids)) if self.every_position else len(self.item_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass has to compute."""
        return len(self.query_ids) + sum(map(len, self.item_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """Sum of the lengths of all prompts, as if each had been scored alone."""
        return len(self.query_ids) * len(self.item_ids) + sum(map(len, self.item_ids))


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a request's life in the engine, one after the other."""

    queue: float  # from its arrival until its first batch was chosen
    batch: float  # until that batch was laid out and launched
    device: float  # until its last result was collected


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """What the model says at the last token of each prompt, in item order, all float32.

    `label_logits[i][j]` is the logit of label j of item i; `lse[i]` is the log-sum-exp of item i's
    logits of the full vocabulary, or of all classes (None unless asked for), so log-probability =
    logit - lse. The N rows are the items; with `every_position` they are all tokens of all items,
    one item after the other, and label j of an item is that of its token j.
    """

    label_logits: tuple[Float32Array, ...]
    lse: Float32Array | None  # [N]
    top_ids: Int32Array | None  # [N] the most probable tokens, the lowest on a tie ...
    top_logits: Float32Array | None  # [N] ... and their logits, of the sum that `lse` is of
    computed_tokens: int
    timings: Timings
