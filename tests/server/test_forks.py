"""Promise: a server that is a fork of the fork server is set up as one in a new interpreter, and so
is its engine's process; so tests may use the one for the other."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support.connections import Connection
from support.programs import run, start
from support.serving import children, running, wait_until
from support.tape_servers import engine_of, tape_server

MASKS = re.compile(r"^(Sig(?:Blk|Ign|Cgt)):\s*(\w+)", re.MULTILINE)
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads /proc, and forks on Linux only"
)


def set_up(pid):
    """Return what a process has from its start, with the numbers of pipes and sockets left out."""
    process = Path(f"/proc/{pid}")
    files = [os.readlink(process / "fd" / name) for name in os.listdir(process / "fd")]
    streams = [os.readlink(process / "fd" / str(number)) for number in range(3)]
    return {
        "masks": MASKS.findall((process / "status").read_text()),
        "files": sorted(re.sub(r"\[\d+\]", "", file) for file in files),
        "streams": [re.sub(r"\[\d+\]", "", stream) for stream in streams],
        "folder": os.readlink(process / "cwd"),
        "same output": os.path.samefile(process / "fd" / "1", process / "fd" / "2"),
    }


def server_and_engine(fork):
    with tape_server(fork=fork) as (server, client):
        client.close()
        engine = engine_of(server)
        state = {"server": set_up(server.process.pid), "engine": set_up(engine)}
        server.process.kill()
        assert server.process.wait(5) == -signal.SIGKILL
        wait_until(lambda: not running(engine), seconds=2)
    return state


def test_forked_servers_have_the_signals_and_files_of_new_ones():
    assert server_and_engine(fork=True) == server_and_engine(fork=False)


def test_a_killed_program_has_its_own_session(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        process = start("gpuscore", ["serve", "demo"], stdout=out, stderr=out, session=True)
    wait_until(lambda: children(process.pid) and os.getsid(process.pid) == process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(5) == -signal.SIGKILL


def test_arguments_environment_streams_and_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it.toml").write_text("max_items = 0\n")
    done = run("serve", "--config", "it.toml")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == "gpuscore: it.toml: max_items must be an integer of at least 1, got 0\n"
    done = run("info", GPUSCORE_MODEL="/no/such")
    assert done.returncode == 78
    assert "environment GPUSCORE_MODEL" in done.stdout
    assert "/no/such" in done.stderr


def test_a_program_ends_with_the_process_that_asked_for_it():
    pipe = subprocess.PIPE
    process = start("gpuscore", ["serve", "demo", "--port", "0"], stdout=pipe, stderr=pipe)
    wait_until(lambda: children(process.pid))
    (engine,) = children(process.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.connection.close()
    wait_until(lambda: not running(process.pid) and not running(engine), seconds=5)
    process.stdout.close()
    process.stderr.close()


def test_the_exit_code_of_a_signal():
    with tape_server() as (server, client), Connection(client):
        os.kill(server.process.pid, signal.SIGABRT)
        assert server.process.wait(5) == -signal.SIGABRT
