"""Promise: a result is read as it was written, or counts as not there."""

import numpy as np
import pytest

from gpuscore.commands.bulk.rows import AnswerLine, BadTextRow, RowScoring
from gpuscore.commands.bulk.store import ANSWERED, BAD, FAILED, SCORED, ResultStore


@pytest.fixture
def store(tmp_path):
    """A store of rows with three scores, in which row 1 has none."""
    made = ResultStore(tmp_path, 3)
    made.put(RowScoring([4, 0], np.array([[0.1, -0.0, np.inf], [1e-300, 0.2, 0.7]])))
    made.put(BadTextRow(2, "the reason, ☃"))
    made.put(AnswerLine(3, b"{}", failed=False))
    made.put(AnswerLine(6, b"", failed=True))
    yield made
    made.close()


KINDS = [SCORED, 0, BAD, ANSWERED, SCORED, 0, FAILED]


def test_results_are_read_as_they_were_written(store, tmp_path):
    for reader in (store, ResultStore(tmp_path, 3)):
        kinds, scores = reader.scan(0, 9)
        assert kinds == [*KINDS, 0, 0]
        assert [reader.kind(number) for number in range(7)] == KINDS
        assert scores[[0, 4]].tolist() == [[1e-300, 0.2, 0.7], [0.1, -0.0, np.inf]]
        texts = [reader.text(number) for number in (2, 3, 6)]
        assert texts == ["the reason, ☃".encode(), b"{}", b""]
    again = ResultStore(tmp_path, 3)
    again.put(BadTextRow(1, "later"))
    assert (again.text(1), again.text(2)) == (b"later", "the reason, ☃".encode())


def test_every_changed_byte_is_noticed(store, tmp_path):
    for name, row in (("results", 4), ("results", 2), ("texts", 2)):
        path = tmp_path / name
        content = path.read_bytes()
        size = len((tmp_path / "results").read_bytes()) // 7
        begin, end = (row * size, (row + 1) * size) if name == "results" else (0, 16 + 15)
        for index in range(begin, end):
            changed = bytearray(content)
            changed[index] ^= 0x10
            path.write_bytes(changed)
            assert store.kind(row) == 0, (name, index)
        path.write_bytes(content)
        assert store.kind(row) != 0


def test_a_result_at_another_rows_place_is_noticed(store, tmp_path):
    path = tmp_path / "results"
    content = path.read_bytes()
    size = len(content) // 7
    path.write_bytes(content[size * 4 : size * 5] * 7)
    assert [store.kind(number) for number in range(7)] == [0, 0, 0, 0, SCORED, 0, 0]
