"""Promise: `gpuscore batch --ray` gives every row once the scores that it has without Ray; a lost
actor, node or driver loses no row and doubles none; what cannot work is refused in words."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from ray.cluster_utils import Cluster

import gpuscore
from batch_runs import (
    done,
    make_rows,
    processes_of,
    read_rows,
    run,
    running,
    until,
    words,
    write_rows,
)
from nodes import FOLDER

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
HOME = {"HOME": f"{FOLDER}/home"}  # of the nodes and of drivers that need one
ROWS = make_rows(3000, queries=700)
ROWS[3]["item"] = None
INDEX = pa.field("row_index", pa.int64())


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """A cluster of two nodes with room for one engine each, and a head without any."""
    folder = Path(FOLDER, "batch")
    folder.mkdir()
    head = {**NODE, "num_cpus": 0, "temp_dir": str(folder)}
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


def parts(output: Path) -> list[Path]:
    return sorted(output.glob("part-*"))


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Return an output's rows by their index, which must all differ; without it."""
    if output.suffix == ".parquet":
        rows = pa.concat_tables(map(parquet.read_table, parts(output))).to_pylist()
    else:
        rows = [json.loads(line) for part in parts(output) for line in part.open()]
    rows.sort(key=lambda row: int(row["row_index"]))
    indices = [row.pop("row_index") for row in rows]
    assert len(set(indices)) == len(indices)
    return rows


def check_same(output: Path, whole: Path) -> None:
    assert rows_of(output) == read_rows(whole)
    bad = output.with_name(f"{output.name}.bad.jsonl")
    assert bad.read_bytes() == whole.with_name(f"{whole.name}.bad.jsonl").read_bytes()
    assert {path.name for path in output.iterdir()} == {
        *(path.name for path in parts(output)),
        "_SUCCESS",
    }
    assert not output.with_name(f"{output.name}.work").exists()


def nothing_runs(cluster: Cluster) -> bool:
    return not any(processes_of(cluster.list_all_nodes()).values())


def test_losses_lose_no_row(two: Cluster, source: Path, whole: Path, tmp_path: Path) -> None:
    """An engine, an actor and a node are killed while both nodes' engines are at work; at the end
    no process is left."""
    output = tmp_path / "out.jsonl"
    command = on_ray(two, source, output)
    with running(command) as process:
        until(lambda: len(processes_of(list(two.worker_nodes))["engines"]) == 2, process)
        for number, victim in enumerate(("engines", "actors")):
            until(lambda: len(done(output)) > number, process)  # noqa: B023
            os.kill(processes_of(two.list_all_nodes())[victim][0], signal.SIGKILL)
        until(lambda: len(done(output)) > len(("engines", "actors")), process)
        two.remove_node(next(iter(two.worker_nodes)), allow_graceful=False)
        two.add_node(**NODE, env_vars=HOME)
        _, told = process.communicate(timeout=240)
    if process.returncode == 70:  # Ray could not replace what it lost
        assert told.endswith("; the same command goes on\n"), told
        code, told = run(command)
        assert code == 0, told
    else:
        assert process.returncode == 0, told
    check_same(output, whole)
    until(lambda: nothing_runs(two))


def test_a_stopped_driver_is_continued_with_the_groups_that_are_left(
    two: Cluster, source: Path, whole: Path, tmp_path: Path
) -> None:
    """Killed, interrupted, then left alone; the actor, at most one, ends each time."""
    output = tmp_path / "out.jsonl"
    command, before = on_ray(two, source, output, "--ray-actors", "1"), dict[Path, int]()
    for signum in (signal.SIGKILL, signal.SIGINT):
        with running(command) as process:
            until(lambda: len(done(output)) > len(before), process)  # noqa: B023
            assert len(processes_of(two.list_all_nodes())["actors"]) == 1
            process.send_signal(signum)
            assert process.wait(30) in {-signal.SIGKILL, 128 + signal.SIGINT}
        until(lambda: nothing_runs(two))
        assert not (output / "_SUCCESS").exists()
        before |= {part: times(part) for part in parts(output) if part.stem in done(output)}
    code, told = run(command)
    assert code == 0, told
    check_same(output, whole)
    assert before == {part: times(part) for part in before}


def times(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_every_format(two: Cluster, tmp_path: Path) -> None:
    """Several files, named by a pattern; without `--deterministic`. The second file of JSON lines
    has a field more than the first one, and numbers of another type."""
    table, scores = pa.Table.from_pylist(ROWS[4:600]), []
    for suffix in ("parquet", "csv", "jsonl"):
        (tmp_path / suffix).mkdir()
        for number in range(2):
            path, part = tmp_path / suffix / f"{number}.{suffix}", table.slice(number * 300, 300)
            if suffix == "parquet":
                parquet.write_table(part, path)
            elif suffix == "csv":
                csv.write_csv(part, path)
            else:
                more = {"rank": 0.5, "late": True} if number else {"rank": 1}
                write_rows(path, [row | more for row in part.to_pylist()])
    for suffix, wanted in (("parquet", "jsonl"), ("csv", "parquet"), ("jsonl", "parquet")):
        output = tmp_path / f"from-{suffix}.{wanted}"
        command = words(tmp_path / suffix / f"*.{suffix}", output, "--ray", two.address)
        code, told = run(command)
        assert code == 0, told
        rows = rows_of(output)
        assert [int(row["id"]) for row in rows] == table.column("id").to_pylist()
        assert [row["item"] for row in rows] == table.column("item").to_pylist()
        scores.append([row["scores"] for row in rows])
    whole = tmp_path / "whole.parquet"
    code, told = run(words(tmp_path / "jsonl", whole))
    assert code == 0, told
    plain = parquet.read_table(whole)
    assert {parquet.read_schema(part) for part in parts(output)} == {
        plain.schema.insert(plain.schema.get_field_index("scores"), INDEX)
    }
    assert [{**row, "scores": None} for row in rows] == [
        {**row, "scores": None} for row in plain.to_pylist()
    ]
    for each in scores:
        for here, there in zip(each, plain.column("scores").to_pylist(), strict=True):
            assert here == pytest.approx(there, abs=3e-6)


def test_requests(two: Cluster, tmp_path: Path) -> None:
    """Answers with an error are rows of the output, too."""
    body = {"query": "a red lamp", "documents": ["A blue chair.", "A red lamp."]}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, url in enumerate(["/v1/rerank", "/v1/no-such-path", "/v1/rerank"])
    ]
    command = words(write_rows(tmp_path / "in.jsonl", lines), tmp_path / "whole.jsonl")
    for flag in ("--query-column", "--labels"):
        del command[command.index(flag) : command.index(flag) + 2]
    command += ["--requests", "--max-bad", "0.5"]
    assert run(command)[0] == 0
    command[command.index("--output") + 1] = str(tmp_path / "out.jsonl")
    code, told = run([*command, "--ray", two.address])
    assert code == 0, told
    rows, wanted = rows_of(tmp_path / "out.jsonl"), read_rows(tmp_path / "whole.jsonl")
    statuses = [row["response"]["status_code"] for row in wanted]
    assert statuses == [200, 404, 200]
    assert [row["response"]["status_code"] for row in rows] == statuses
    assert [row["id"] for row in rows] == [row["id"] for row in wanted]
    results = [row["response"]["body"].get("results") for row in wanted]
    assert [row["response"]["body"].get("results") for row in rows] == results


def test_what_is_there_is_not_overwritten_and_changes_are_refused(
    two: Cluster, tmp_path: Path
) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS[4:40]), tmp_path / "out.jsonl"
    command = on_ray(two, source, output)
    with running([*command, "--threads", "2"]) as process:  # no node has two: it waits
        work = output.with_name("out.jsonl.work")
        until(lambda: (work / "plan.json").exists(), process)
        code, told = run([*command, "--threads", "2"])
        assert (code, "another run is writing it" in told) == (78, True), told
    code, told = run([*command, "--apply-softmax", "--threads", "2"])
    assert (code, "--apply-softmax was False when this job began" in told) == (78, True), told
    write_rows(source, ROWS[4:30])
    code, told = run([*command, "--threads", "2"])
    assert (code, "changed" in told) == (78, True), told
    shutil.rmtree(work)
    assert run(command)[0] == 0
    code, told = run(command)
    assert (code, f"{output} exists already" in told) == (78, True), told


def test_a_strict_job_ends_at_a_bad_row(two: Cluster, source: Path, tmp_path: Path) -> None:
    code, told = run(on_ray(two, source, tmp_path / "out.jsonl", "--strict"))
    assert code == 1
    assert "in.jsonl, row 4: item is null, not text" in told


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "message"),
    [("local", "the address is not auto or HOST:PORT"), ("", "nothing answers there: ")],
)
def test_an_address_without_a_cluster_is_an_error(
    source: Path, tmp_path: Path, address: str, message: str
) -> None:
    address = address or closed_port()
    code, told = run(words(source, tmp_path / "out.jsonl", "--ray", address))
    assert code == 78
    assert f"--ray {address}: {message}" in told
    assert len(told.splitlines()) == 1


def test_a_node_without_the_same_model_ends_the_job(
    two: Cluster, source: Path, tmp_path: Path
) -> None:
    """Each node looks for `~/model` in a home of its own."""
    demo = Path(gpuscore.__file__).parent / "demo"
    home = tmp_path / "here"
    shutil.copytree(demo, home / "model")
    there = shutil.copytree(demo, Path(HOME["HOME"], "model"), dirs_exist_ok=True)
    content = bytearray((there / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (there / "model.safetensors").write_bytes(content)
    command = on_ray(two, source, tmp_path / "out.jsonl")
    command[1] = "~/model"
    code, told = run(command, {"HOME": str(home)})
    assert code == 78, told
    assert "model.safetensors of ~/model is another one than on the driver's machine" in told
