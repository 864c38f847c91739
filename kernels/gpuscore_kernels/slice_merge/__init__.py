"""The second half of the label head: a row's slices of the vocabulary are combined."""

MAX_TOP = 20  # best tokens of a row
