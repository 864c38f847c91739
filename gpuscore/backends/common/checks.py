"""What a device must not see: an index outside an array is read there without a word, or ends the
process."""

from gpuscore.batch import PackedBatch


def check_ids(batch: PackedBatch, vocab_rows: int, label_rows: int) -> None:
    """Raises IndexError for tokens or labels that the weights do not have."""
    for name, rows in (("token_ids", vocab_rows), ("label_token_ids", label_rows)):
        ids = getattr(batch, name)
        if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
            raise IndexError(
                f"{name} go from {ids.min()} to {ids.max()}, valid are 0 to {rows - 1}"
            )
