"""What a backend can take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What a backend can take; the engine plans within it."""

    max_tokens: int  # tokens of one batch
    page_size: int  # tokens of one KV page
    num_pages: int
    max_model_len: int  # tokens of one prompt
    vocab_rows: int  # valid token ids of prompts are 0 <= id < vocab_rows
    token_buckets: tuple[int, ...] = ()  # padded batch sizes; empty = ragged
    identity: str = ""  # of model, revision and dtype: what cached keys and values belong to
    # 0, or: a row's result has the same bits in every batch, if the chunks of a sequence end at
    # multiples of this many tokens and if where a prompt is cut depends on its query alone.
    deterministic_chunk: int = 0
    # Names of a classification model's classes, which are its labels; None = labels are tokens.
    classes: tuple[str, ...] | None = None

    @property
    def label_rows(self) -> int:
        """Valid label ids are 0 <= id < label_rows."""
        return self.vocab_rows if self.classes is None else len(self.classes)
