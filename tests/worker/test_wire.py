"""Promise: a message arrives over the pipe as it was sent, and anything malformed is refused."""

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from gpuscore.errors import NonfiniteScore, TooManyTokens
from gpuscore.processes.worker.wire import (
    Cancel,
    Failure,
    FromChild,
    Heartbeat,
    ProtocolError,
    Ready,
    Result,
    Score,
    ToChild,
    check_request,
    check_result,
    decoder,
    encode,
)
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import LabelTrie, Readouts, ScoreRequest, ScoreResult, Timings
from support.batches import every_token


def ints(*values):
    return np.array(values, dtype=np.int32)


REQUEST = ScoreRequest(
    ints(5, 6, 7), (ints(1), ints(2, 3)), (ints(9), ints(8, 9)), True, 2, -4, "salt", 12.5
)
RESULT = ScoreResult(
    (np.float32([1.5]), np.float32([2.5, -3.5])),
    np.float32([4, 5]),
    ints(7, 8, 2, 3).reshape(2, 2),
    np.float32([[9, 8], [10, 7]]),
    6,
    Timings(0.1, 0.2, 0.3),
)


LIMITS = BackendLimits(64, 16, 9, 40, vocab_rows=10)
to_child, from_child = decoder(ToChild), decoder(FromChild)


def equal(message, other):
    for name in type(message).__struct_fields__:
        a, b = getattr(message, name), getattr(other, name)
        if isinstance(a, tuple):
            assert len(a) == len(b)
            for one, wanted in zip(a, b, strict=True):
                np.testing.assert_array_equal(one, wanted, strict=True)
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, strict=True)
        elif isinstance(a, Readouts):
            equal(a, b)
        else:
            assert a == b


def arrived(request, limits=LIMITS):
    return check_request(to_child(encode(Score(3, request))).request, limits)


def answered(result, request):
    return check_result(from_child(encode(Result(3, result))).result, request)


def test_a_request_and_its_result_arrive_as_they_were():
    assert to_child(encode(Score(3, REQUEST))).id == 3
    equal(arrived(REQUEST), REQUEST)
    equal(answered(RESULT, REQUEST), RESULT)


def test_the_classes_of_a_classification_model_arrive():
    limits = BackendLimits(64, 16, 9, 40, 10, classes=("good", "not good", "n\u00e9"))
    assert from_child(encode(Ready(limits, ""))).limits == limits
    assert limits.label_rows == 3
    request = replace(REQUEST, label_ids=(ints(2), ints(0, 1)))
    equal(arrived(request, limits), request)
    with pytest.raises(ProtocolError, match="outside 0 to 2"):
        arrived(REQUEST, limits)


def test_a_request_for_every_position_and_its_result():
    items, labels = (ints(1), ints(2, 3)), (ints(4), ints(3, 5))
    request = ScoreRequest(ints(), items, labels, True, 1, readouts=every_token(items))
    equal(arrived(request), request)
    logits, rows = (np.float32([1.5]), np.float32([2.5, -3.5])), np.float32([4, 5, 6])
    result = ScoreResult(
        logits, rows, ints(7, 8, 9)[:, None], rows[:, None], 6, Timings(0.1, 0.2, 0.3)
    )
    equal(answered(result, request), result)
    with pytest.raises(ProtocolError, match="parts that its request asked for"):
        answered(replace(result, lse=rows[:2]), request)
    readouts = every_token(items, ints(7, 1))
    with_query = replace(request, query_ids=ints(6, 7), readouts=readouts, num_top=3)
    equal(arrived(with_query), with_query)
    of_query = replace(
        result,
        label_logits=(np.float32([0.5, 1]), *logits),
        lse=np.arange(5, dtype=np.float32),
        top_ids=ints(*range(15)).reshape(5, 3),
        top_logits=np.arange(15, dtype=np.float32).reshape(5, 3),
    )
    equal(answered(of_query, with_query), of_query)
    with pytest.raises(ProtocolError, match="outside 0 to 6"):
        arrived(with_query, BackendLimits(64, 16, 9, 40, vocab_rows=7))
    changed = encode(Score(3, with_query)).replace(ints(7, 1).tobytes(), ints(7, 99).tobytes())
    with pytest.raises(ProtocolError, match="outside 0 to 9"):
        check_request(to_child(changed).request, LIMITS)
    shorter = b"\x92\2\1".join(encode(Score(3, request)).rsplit(b"\x92\1\2", 1))
    with pytest.raises(ProtocolError, match="do not add up to the labels"):
        to_child(shorter)


def test_labels_of_several_tokens_arrive():
    trie = LabelTrie(((8, 9, 1), (8,), (3, 2)))
    request = ScoreRequest(
        ints(5, 6), (ints(1), ints(2, 3)), (trie.first_ids,) * 2, need_lse=True, trie=trie
    )
    got = arrived(request)
    equal(got, request)
    equal(arrived(got), request)
    assert got.trie.places.tolist() == trie.places.tolist()
    frame = encode(Score(3, request))
    sent = msgspec.msgpack.encode(trie.sequences)
    for changed in (
        ((8, 9, 10), (8,), (3, 2)),  # 10 is no token
        ((8, 9, -1), (8,), (3, 2)),
        ((8, 9), (8,), (4, 2)),  # other first tokens
        ((8, 9), (8,), ()),
        (),
    ):
        other = frame.replace(sent, msgspec.msgpack.encode(changed))
        assert other != frame
        with pytest.raises(ProtocolError):
            check_request(to_child(other).request, LIMITS)


def test_shared_labels_travel_once_and_stay_shared():
    labels = np.arange(128, dtype=np.int32)
    request = ScoreRequest(ints(1), tuple(ints(i) for i in range(10_000)), (labels,) * 10_000, True)
    frame = encode(Score(1, request))
    assert len(frame) < 100_000
    got = check_request(to_child(frame).request, BackendLimits(64, 16, 9, 40, vocab_rows=20_000))
    equal(got, request)
    assert len({*map(id, got.label_ids)}) == 1


def test_an_error_arrives_as_it_was():
    error = NonfiniteScore("not finite", param="items[3]")
    got = from_child(encode(Failure.of(1, error))).error()
    assert type(got) is NonfiniteScore
    assert (got.message, got.param, got.retry_after) == ("not finite", "items[3]", None)
    bug = Failure.of(1, KeyError("secret")).error()
    assert (bug.code, bug.message) == ("internal_error", "the engine failed")
    assert type(Failure.of(1, TooManyTokens("x", retry_after=3)).error()) is TooManyTokens


@pytest.mark.parametrize(
    "changed",
    [
        {"query_ids": ints(10)},
        {"query_ids": ints(-1)},
        {"item_ids": (ints(1), ints(2, -1))},
        {"item_ids": (ints(1),)},
        {"item_ids": (ints(1), ints())},
        {"item_ids": (), "label_ids": ()},
        {"label_ids": (ints(1),) * 3},
        {"label_ids": (ints(1), ints())},
        {"label_ids": (ints(1), ints(10))},
    ],
)
def test_a_request_that_does_not_hold_together(changed):
    with pytest.raises(ProtocolError):
        arrived(replace(REQUEST, **changed))


@pytest.mark.parametrize(
    "query",
    [b"\0" * 5, 5, "text", None, [b"\0" * 8, 3], [b"\0" * 8], [b"\0" * 8, "2"], [1, 2, 3], 0],
)
def test_an_array_of_another_form(query):
    rows = [b"\0" * 8, [1, 1]]
    fields = [query, rows, rows, True, 0, 0, "", None, False, None, None]
    with pytest.raises(ProtocolError):
        to_child(msgspec.msgpack.encode(["Score", 1, fields]))


@pytest.mark.parametrize(
    "rows",
    [
        b"\0" * 8,
        [b"\0" * 8],
        [b"\0" * 8, [1]],
        [b"\0" * 8, [3, -1]],
        [b"\0" * 8, []],
        [b"\0" * 8, [1.0, 1.0]],
        [b"\0" * 7, 2],
        [b"\0" * 8, -1],
        [b"\0" * 8, "1"],
    ],
)
def test_rows_of_another_form(rows):
    fields = [b"\0" * 4, rows, rows, True, 0, 0, "", None, False, None, None]
    with pytest.raises(ProtocolError):
        check_request(to_child(msgspec.msgpack.encode(["Score", 1, fields])).request, LIMITS)


def test_an_array_that_is_none_of_32_bits():
    for wrong in (np.arange(3), np.float64([1])):
        with pytest.raises(TypeError):
            encode(Score(1, replace(REQUEST, query_ids=wrong)))


@pytest.mark.parametrize(
    "changed",
    [
        {"label_logits": (RESULT.label_logits[0],)},
        {"lse": np.float32([1])},
        {"lse": None},
        {"top_ids": ints(1, 2, 3)},
        {"top_ids": ints(1, 2)},
        {"top_ids": None},
        {"top_logits": np.float32([1])},
        {"top_logits": None},
    ],
)
def test_a_result_of_another_request(changed):
    with pytest.raises(ProtocolError):
        answered(replace(RESULT, **changed), REQUEST)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode(Cancel(3))[:-1],
        encode(Cancel(3)) + b"x",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(["Cancel", -1]),
        msgspec.msgpack.encode(["Cancel", True]),
        msgspec.msgpack.encode(["Heartbeat", {}, 1.0]),
        msgspec.msgpack.encode(["Exec", "x"]),
        msgspec.msgpack.encode(["Refused", b"\xff"]),
        b"\x92\xa7Refused\xa1\xff",
    ],
)
def test_malformed_messages(frame):
    for decode in (to_child, from_child):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_each_side_takes_its_own_messages_only():
    with pytest.raises(ProtocolError):
        from_child(encode(Cancel(1)))
    with pytest.raises(ProtocolError):
        to_child(encode(Failure(1, "unavailable", "x", None, None)))
    with pytest.raises(ProtocolError):
        Failure(1, "no such code", "x", None, None).error()
    with pytest.raises(ProtocolError):
        from_child(encode(Heartbeat(None, 1.0)))
