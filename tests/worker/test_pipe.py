"""Promise: messages arrive whole and in order, whatever their size; nobody who sends one waits."""

import socket
import threading
import time
import tracemalloc
from contextlib import ExitStack, closing

import pytest

from gpuscore.processes.worker.wire import MAX_FRAME, Pipe, ProtocolError


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture
def made():
    """A factory of pipes that are closed at the end."""
    with ExitStack() as ending:
        yield lambda sock: ending.enter_context(closing(Pipe(sock)))


@pytest.fixture
def pump():
    """Read from pipes in threads, as the processes do, until their other end closes."""
    threads = []

    def run(pipe):
        try:
            while True:
                pipe.read()
        except EOFError:
            pass

    def start(pipe):
        threads.append(threading.Thread(target=run, args=(pipe,)))
        threads[-1].start()
        return pipe

    yield start
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def frames_of(pipe, count):
    frames, end = [], time.monotonic() + 10
    while len(frames) < count:
        assert time.monotonic() < end
        frames += pipe.read(1)
    return frames


def test_frames_in_pieces(pair, made, pump):
    """A large frame is written in parts and small ones are read in parts."""
    sent = [b"", b"x", bytes(5_000_000), b"last"]
    writer, reader = pump(made(pair[0])), made(pair[1])
    writer.put(*(lambda frame=frame: frame for frame in sent))
    assert frames_of(reader, 4) == sent
    assert reader.read(0.05) == []
    for byte in b"\x02\0\0\0a":
        pair[0].send(bytes([byte]))
        assert reader.read(1) == []
    pair[0].send(b"b")
    assert reader.read(1) == [b"ab"]
    pair[1].shutdown(socket.SHUT_RDWR)


def test_a_small_frame_takes_little_memory(pair, made):
    """A large block for each receive, held while it waits, would split the engine's heap."""
    reader = made(pair[1])
    tracemalloc.start()
    try:
        pair[0].send(b"\x02\0\0\0ab")
        assert reader.read() == [b"ab"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000


def test_nobody_waits_for_a_full_pipe(pair, made, pump):
    """Neither who puts a message, nor the thread that reads: it may read what is there."""
    writer, other = made(pair[0]), made(pair[1])
    start = time.monotonic()
    for now in (True, False) * 5:
        writer.put(lambda: bytes(1_000_000), now=now)
    assert writer.read(0) == []
    other.put(lambda: b"answer", now=True)
    assert writer.read(1) == [b"answer"]
    assert time.monotonic() - start < 5
    assert not writer.idle
    pump(writer)
    assert frames_of(other, 10) == [bytes(1_000_000)] * 10
    pair[1].shutdown(socket.SHUT_RDWR)


def test_a_message_that_is_alone_is_sent_by_its_caller(pair, made):
    writer, reader, threads = made(pair[0]), made(pair[1]), []

    def make():
        threads.append(threading.get_ident())
        return b"one"

    writer.put(make, now=True)
    assert frames_of(reader, 1) == [b"one"]
    writer.put(make)
    assert reader.read(0.05) == []
    assert len(threads) == 1
    start = time.monotonic()
    assert writer.read(5) == []
    assert time.monotonic() - start < 2, "the thread that reads was not woken"
    assert frames_of(reader, 1) == [b"one"]


def test_messages_of_many_threads_arrive_whole(pair, made, pump):
    writer, reader = pump(made(pair[0])), made(pair[1])

    def put(first):
        for number in range(first, first + 300):
            frame = number.to_bytes(2, "big") * (1 if number % 50 else 100_000)
            writer.put(lambda frame=frame: frame, now=number % 2 == 0)

    callers = [threading.Thread(target=put, args=(1000 * n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    frames = frames_of(reader, 1200)
    for caller in callers:
        caller.join()
    numbers = [{*zip(frame[::2], frame[1::2], strict=True)} for frame in frames]
    assert {len(number) for number in numbers} == {1}
    assert len(set(map(frozenset, numbers))) == 1200
    pair[1].shutdown(socket.SHUT_RDWR)


def test_ends_and_limits(pair, made):
    reader = made(pair[1])
    pair[0].send((MAX_FRAME + 1).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match=f"{MAX_FRAME + 1} bytes"):
        reader.read()
    pair[0].close()
    with pytest.raises(EOFError):
        reader.read()


@pytest.mark.parametrize("now", [True, False])
def test_a_message_that_cannot_be_encoded_ends_the_connection(pair, made, caplog, now):
    writer = made(pair[0])
    writer.put(lambda: 1 // 0, now=now)
    if not now:
        assert writer.read(5) == []
    for end in (writer, made(pair[1])):
        with pytest.raises(EOFError):
            end.read()
    assert "could not be sent" in caplog.text
