"""Promise: standard streams that are closed, full or unread stop no server, and neither they nor
signals end a command with a traceback. The console script starts real processes.
"""

import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from support.connections import Connection, connected, free_port, hold, large_request
from support.programs import COMMAND, start
from support.serving import QUICK, RunningServer, children, wait_until
from support.slow import slow

CLOSED = "exec 0<&- 1>&- 2>&-;"
ALICE, BOB = "key-of-alice", "key-of-bob"


def hang_up(process):
    """Send the signal of a closing terminal to every process, as soon as the server has a child."""
    if children(process.pid):
        os.killpg(process.pid, signal.SIGHUP)


@contextmanager
def server(*flags, prefix="", meanwhile=lambda process: None, fork=False, **streams):
    """Start a server of the demo model with the caller's streams and yield it when it is ready.

    It gets a session of its own. With `fork` it is a fork of the fork server, otherwise a new
    interpreter, which a shell starts after `prefix`.
    """
    port = free_port()
    words = ["serve", "demo", "--port", str(port), *QUICK, *flags]
    if fork:
        process = start("gpuscore", words, session=True, **streams)
    else:
        command = ["/bin/sh", "-c", f'{prefix} exec "$@"', "sh", COMMAND, *words]
        process = subprocess.Popen(command, start_new_session=True, **streams)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(
            lambda: meanwhile(process) or process.poll() is not None or ready(url), seconds=60
        )
        assert process.poll() is None, "ended before it was ready"
        yield RunningServer(url, process)
    finally:
        process.kill()
        process.wait()


def ready(url):
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def status(server, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"items": [[5], [6]], "label_token_ids": [3]}
    return httpx.post(f"{server.url}/v1/score", json=body, headers=headers).status_code


def ends(server, number, code=0):
    server.process.send_signal(number)
    assert server.process.wait(timeout=20) == code


def descriptor(pid, number):
    return os.readlink(f"/proc/{pid}/fd/{number}")


def test_closed_streams_are_opened_before_a_socket_can_take_their_place(tmp_path):
    """While the model loads, SIGHUP arrives again and again. Only the engine imports torch."""
    keys = tmp_path / "keys"
    keys.write_text(ALICE)
    with server("--api-key-file", str(keys), prefix=CLOSED, meanwhile=hang_up) as running:
        (engine,) = children(running.process.pid)
        for pid in (running.process.pid, engine):
            assert [descriptor(pid, number) for number in range(3)] == ["/dev/null"] * 3
        assert not has_torch(running.process.pid)
        assert has_torch(engine)
        assert status(running, ALICE) == 200
        ends(running, signal.SIGTERM)


def has_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_streams_that_nobody_reads():
    """Standard output has lost its reader, and standard error is a full pipe."""
    reading, broken = os.pipe()
    os.close(reading)
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    with server(stdout=broken, stderr=full, fork=True) as running:
        for _ in range(20):
            assert status(running) == 200
        ends(running, signal.SIGHUP)  # works like SIGTERM if there are no keys to read again
    for number in (broken, unread, full):
        os.close(number)


def test_a_hangup_reads_the_keys_again(tmp_path):
    """Signals reach the engine too, as a terminal's do. Standard output has no room."""
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text(ALICE)
    with log.open("wb") as errors, open("/dev/full", "wb") as full:
        flags = ("--api-key-file", str(keys), "--compile", "off")  # slow
        with server(*flags, stdout=full, stderr=errors, fork=True) as running:
            hang_up(running.process)
            assert (status(running, ALICE), status(running, BOB)) == (200, 401)
            with connected(running, ALICE) as client, Connection(client) as connection:
                hold(client, connection, large_request(8_000))
                keys.write_text(BOB)
                hang_up(running.process)
                wait_until(lambda: status(running, BOB) == 200)
                assert status(running, ALICE) == 401
                assert connection.reply().status == 200, "let in with a key of then"
            for broken in (b"", b"\n \n", b"\xff\xfe", None):
                check_refused(running, keys, broken, log)
            ends(running, signal.SIGTERM)
    assert log.read_text().count("the API keys were not reloaded") == 4, "a line each"
    assert not any(key in log.read_text() for key in (ALICE, BOB))


def check_refused(running, keys, content, log):
    """A key file that cannot be used leaves the keys as they were and logs one line."""
    refused = log.read_text().count("the API keys were not reloaded")
    keys.unlink()
    if content is not None:
        keys.write_bytes(content)
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: log.read_text().count("the API keys were not reloaded") > refused)
    assert status(running, BOB) == 200


FEW, ALL = (0.0, 0.1, 0.4), (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 2.0)  # seconds


@pytest.mark.parametrize(
    ("number", "delays"),
    [
        *((number, FEW) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
        *slow(*((number, ALL) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))),
    ],
)
def test_a_signal_during_the_imports(number, delays):
    """A signal is handled from our first line on; before it, Python itself is still starting."""
    for delay in delays:
        with subprocess.Popen(
            [COMMAND, "serve", "demo", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                # SIGHUP's handler is set last; Python itself handles SIGINT from the start.
                wait_until(lambda pid=process.pid: catches(pid, signal.SIGHUP))
                time.sleep(delay)
                process.send_signal(number)
                output, errors = process.communicate(timeout=20)
            finally:
                process.kill()
        # What is through with its imports within the delay says so, and stops as a server does.
        assert process.returncode == (0 if b"loading" in output else 128 + number)
        assert b"Traceback" not in errors if output else errors == b""


def catches(pid, number):
    """Return True if the process has a handler for the signal."""
    match = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("unbuffered", ["1", *slow("")])
def test_output_that_finds_no_reader_or_no_room(unbuffered):
    """Shells report 141 for a command whose reader has closed the pipe."""
    gone = run("info", "broken", unbuffered, fork=unbuffered == "1")  # the other one in test-all
    assert gone == (128 + signal.SIGPIPE, b"")
    full = b"gpuscore: the output cannot be written: No space left on device\n"
    assert run("info", "full", unbuffered, fork=True) == (1, full)
    for kind in ("broken", "full"):  # argparse itself ignores errors when it prints help
        code, errors = run("--help", kind, unbuffered)
        assert code in (0, 1, 128 + signal.SIGPIPE)
        assert errors in (b"", full)


def run(word, kind, unbuffered, fork=False):
    """Return the exit code and standard error of a command whose output is a broken pipe or a full
    disk; with `fork` it is a fork of the fork server."""
    reading, broken = os.pipe()
    os.close(reading)
    stream = broken if kind == "broken" else os.open("/dev/full", os.O_WRONLY)
    options = {"stdout": stream, "env": os.environ | {"PYTHONUNBUFFERED": unbuffered}}
    with tempfile.TemporaryFile() as errors:
        process = (
            start("gpuscore", [word], stderr=errors, **options)
            if fork
            else subprocess.Popen([COMMAND, word], stderr=errors, **options)
        )
        try:
            code = process.wait(60)
        finally:
            process.kill()
        for number in {broken, stream}:
            os.close(number)
        errors.seek(0)
        return code, errors.read()


def test_an_error_that_nobody_reads_keeps_its_exit_code():
    reading, broken = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full:
        for stream in (broken, full):
            command = [COMMAND, "serve", "--max-items", "0"]
            assert subprocess.run(command, stderr=stream, timeout=60, check=False).returncode == 78
    os.close(broken)
