"""Promise: `gpuscore batch --ray` writes the bytes that it writes without Ray; a lost actor, node
or driver loses no row and doubles none; what cannot work is refused in words."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

import gpuscore
from batch_runs import (
    make_rows,
    processes_of,
    read_rows,
    run,
    running,
    scoring,
    until,
    words,
    write_rows,
)
from conftest import FOLDER

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
with socket.create_server(("127.0.0.1", 0)) as _free:
    CLIENT_PORT = _free.getsockname()[1]
HOME = {"HOME": f"{FOLDER}/home"}  # of the nodes and of drivers that need one
ROWS = make_rows(3000, queries=700)
ROWS[3]["item"] = None


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """A cluster of two nodes with room for one engine each, and a head without any."""
    folder = Path(FOLDER, "batch")
    folder.mkdir()
    head = {**NODE, "num_cpus": 0, "temp_dir": str(folder), "ray_client_server_port": CLIENT_PORT}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            started.add_node(**NODE, env_vars=HOME)
        yield started
    finally:
        started.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", ROWS)


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """The output of a run without Ray; beside it stand its bad rows."""
    output = source.with_name("whole.jsonl")
    code, told = run(words(source, output, "--deterministic"))
    assert code == 0, told
    return output


def on_ray(cluster: Cluster, source: Path, output: Path, *more: str) -> list[str]:
    return words(source, output, "--deterministic", "--ray", cluster.address, *more)


def check_same(output: Path, whole: Path) -> None:
    assert output.read_bytes() == whole.read_bytes()
    bad = output.with_name(f"{output.name}.bad.jsonl")
    assert bad.read_bytes() == whole.with_name(f"{whole.name}.bad.jsonl").read_bytes()
    assert not output.with_name(f"{output.name}.work").exists()


def shown(node: Any) -> str:
    return f"node {node.node_ip_address} ({node.node_id[:8]})"


def nothing_runs(cluster: Cluster) -> bool:
    return not any(processes_of(cluster.list_all_nodes()).values())


@pytest.mark.parametrize("of_client", [False, True])
def test_the_output_has_the_same_bytes(
    two: Cluster, source: Path, whole: Path, tmp_path: Path, of_client: bool
) -> None:
    """Every node has an engine, and the command says so."""
    output = tmp_path / "out.jsonl"
    address = f"ray://127.0.0.1:{CLIENT_PORT}" if of_client else two.address
    code, told = run([*on_ray(two, source, output), "--ray", address])
    assert code == 0, told
    check_same(output, whole)
    assert f"2 engines on the Ray cluster at {address}" in told
    for node in two.worker_nodes:
        assert f"{shown(node)}: cpu" in told
    until(lambda: nothing_runs(two))


def test_scores_without_fixed_bits_are_close(
    two: Cluster, source: Path, whole: Path, tmp_path: Path
) -> None:
    """More engines than there is room for: the others begin."""
    output = tmp_path / "out.jsonl"
    flags = ("--ray", two.address, "--ray-actors", "3")
    code, told = run(words(source, output, *flags))
    assert code == 0, told
    assert "no room yet: cpu" in told
    for one, other in zip(read_rows(output), read_rows(whole), strict=True):
        assert one.pop("scores") == pytest.approx(other.pop("scores"), abs=1e-5)
        assert one == other


@pytest.mark.parametrize("killed", ["engines", "actors"])
def test_a_lost_process_loses_no_row(
    two: Cluster, source: Path, whole: Path, tmp_path: Path, killed: str
) -> None:
    output = tmp_path / "out.jsonl"
    with running(on_ray(two, source, output)) as process:
        scoring(output, process)
        victim = processes_of(two.list_all_nodes())[killed][0]
        os.kill(victim, signal.SIGKILL)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    check_same(output, whole)


def test_lost_nodes_lose_no_row_and_others_take_their_place(
    two: Cluster, source: Path, whole: Path, tmp_path: Path
) -> None:
    """The job goes on with what is left, and without any node it waits for one."""
    output = tmp_path / "out.jsonl"
    with running(on_ray(two, source, output)) as process:
        scoring(output, process)
        for lost in list(two.worker_nodes):
            two.remove_node(lost, allow_graceful=False)
        joined = [two.add_node(**NODE, env_vars=HOME) for _ in range(2)]
        _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    check_same(output, whole)
    assert "an actor ended: " in told
    assert any(f"an engine joins on {shown(node)}" in told for node in joined), told


def test_a_job_waits_for_a_node_with_room(two: Cluster, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", make_rows(20, queries=3))
    output = tmp_path / "out.jsonl"
    given = on_ray(two, source, output, "--ray-actors", "1")
    given[given.index("--threads") + 1] = "2"
    with running(given) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "waiting for an actor with num_cpus=2: Ray has started none yet" in line
        larger = two.add_node(**{**NODE, "num_cpus": 2})
        try:
            _, told = process.communicate(timeout=120)
        finally:
            two.remove_node(larger, allow_graceful=False)
    assert process.returncode == 0, told
    assert len(read_rows(output)) == 20


def test_a_killed_driver_is_continued_here_and_there(
    two: Cluster, source: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    here, there = words(source, output, "--deterministic"), on_ray(two, source, output)
    for given in ([*there, "--ray-actors", "1"], here, there):
        with running(given) as process:
            until(more_than(output, filled(output)), process)
            process.kill()
            process.wait()
        until(lambda: nothing_runs(two))
        assert not output.exists()
    code, told = run(on_ray(two, source, output))
    assert code == 0, told
    check_same(output, whole)


def filled(output: Path) -> int:
    """Return the number of bytes of a job's results that are not zero."""
    results = output.with_name(f"{output.name}.work") / "results"
    return sum(map(bool, results.read_bytes())) if results.exists() else 0


def more_than(output: Path, bytes_before: int) -> Callable[[], bool]:
    return lambda: filled(output) > bytes_before


def test_an_interrupt_ends_the_actors(two: Cluster, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with running(on_ray(two, source, output)) as process:
        scoring(output, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT
    until(lambda: nothing_runs(two))


def test_a_strict_job_ends_at_a_bad_row(two: Cluster, source: Path, tmp_path: Path) -> None:
    code, told = run(on_ray(two, source, tmp_path / "out.jsonl", "--strict"))
    assert code == 1
    assert "in.jsonl, row 4: item is null, not text" in told


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("local", "the address is not auto, HOST:PORT or ray://HOST:PORT"),
        ("", "nothing answers there: "),
        ("ray://", "nothing answers there: "),
    ],
)
def test_an_address_without_a_cluster_is_an_error(
    source: Path, tmp_path: Path, address: str, message: str
) -> None:
    address = address if address == "local" else address + closed_port()
    code, told = run(words(source, tmp_path / "out.jsonl", "--ray", address))
    assert code == 78
    assert f"--ray {address}: {message}" in told
    assert len(told.splitlines()) == 1


@pytest.fixture(scope="module")
def other_node(two: Cluster) -> Callable[..., Any]:
    """A function that replaces one of the nodes, always the same one, by one with other environment
    variables. The tests that use it are the last ones, because nothing puts the node back."""
    last = [next(iter(two.worker_nodes))]

    def replace(**variables: str) -> Any:
        two.remove_node(last[0], allow_graceful=False)
        last[0] = two.add_node(**NODE, env_vars=variables)
        return last[0]

    return replace


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing", "the directory does not exist"),
        ("lacks", "model.safetensors is missing"),
        ("bytes", "model.safetensors has another SHA-256 than on this machine"),
    ],
)
def test_a_node_without_the_same_model_is_named(
    two: Cluster, source: Path, tmp_path: Path, other_node: Any, damage: str, message: str
) -> None:
    """Each node looks for `~/model` in a home of its own."""
    demo = Path(gpuscore.__file__).parent / "demo"
    shutil.copytree(demo, Path(HOME["HOME"], "model"), dirs_exist_ok=True)
    there = shutil.copytree(demo, tmp_path / "there" / "model")
    if damage == "nothing":
        shutil.rmtree(there)
    elif damage == "lacks":
        (there / "model.safetensors").unlink()
    else:
        content = bytearray((there / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (there / "model.safetensors").write_bytes(content)
    node = other_node(HOME=str(tmp_path / "there"))
    given = on_ray(two, source, tmp_path / "out.jsonl")
    given[1] = "~/model"
    code, told = run(given, HOME)
    assert code == 78, told
    assert shown(node) in told
    assert message in told


def test_a_node_with_another_gpuscore_is_named(
    two: Cluster, source: Path, tmp_path: Path, other_node: Any
) -> None:
    other = tmp_path / "packages" / "gpuscore"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "99.0"\n')
    node = other_node(PYTHONPATH=str(other.parent))
    code, told = run(on_ray(two, source, tmp_path / "out.jsonl"))
    assert code == 78
    assert f"{shown(node)} has gpuscore 99.0, this machine has " in told
