"""Checks of a batch before it reaches a device, where an index outside an array is read silently,
or ends the process."""

from gpuscore.types.batch import PackedBatch


def check_ids(batch: PackedBatch, vocab_rows: int, label_rows: int) -> None:
    """Raise IndexError for token ids or label ids that the weights have no row for."""
    for name, rows in (("token_ids", vocab_rows), ("label_token_ids", label_rows)):
        ids = getattr(batch, name)
        if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
            raise IndexError(
                f"{name} go from {ids.min()} to {ids.max()}, valid are 0 to {rows - 1}"
            )
