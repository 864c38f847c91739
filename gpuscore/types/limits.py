"""The limits of a backend."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Limits of a backend; the engine plans batches within them."""

    max_tokens: int  # tokens of one batch
    page_size: int  # tokens of one KV page
    num_pages: int  # KV pages
    max_model_len: int  # tokens of one prompt
    vocab_rows: int  # valid token ids of prompts are 0 <= id < vocab_rows
    token_buckets: tuple[int, ...] = ()  # padded batch sizes; empty = ragged
    identity: str = ""  # model, revision and dtype, to which cached keys and values belong
    # If not 0: a row's result has the same bits in every batch, provided that the chunks of a
    # sequence end at multiples of this many tokens and that the cut depends on the query alone.
    deterministic_chunk: int = 0
    # Names of a classification model's classes, which are its labels. None = labels are tokens.
    classes: tuple[str, ...] | None = None
    quantized: bool = False  # weights of eight bits: the engine asks known prompts at start

    @property
    def label_rows(self) -> int:
        """Number of valid label ids: 0 <= id < label_rows."""
        return self.vocab_rows if self.classes is None else len(self.classes)
