"""Promise: an engine of a bulk job asks Ray for its devices and nothing else; the rows of a query
are one group's, unless they are too many, whatever else is in the file."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import fs

from batch_runs import write_rows
from gpuscore.commands.bulk.cluster.groups import LEAST_BYTES, Divider, Plan, columns_of, read_rows
from gpuscore.commands.bulk.cluster.storage import InputFile, find_files, on_disk
from gpuscore.commands.bulk.inputs import InputFiles
from gpuscore.commands.bulk.options import JSON_LINES, BatchOptions
from gpuscore.commands.bulk.parquet import schema_bytes, schema_of_bytes, unified
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas.placement import place_on_nodes

MODEL = ModelConfig()


def node(alive: bool = True, **resources: float) -> dict[str, object]:
    return {"Alive": alive, "Resources": resources}


SMALL, LARGE, HEAD = node(CPU=8.0), node(CPU=16.0, GPU=5.0), node()
NODES = [HEAD, SMALL, LARGE, node(False, CPU=64.0, GPU=8.0)]


@pytest.mark.parametrize(
    ("settings", "nodes", "wanted"),
    [
        ({}, NODES, ("cuda", {"num_cpus": 1, "num_gpus": 1}, 5)),
        (
            {"device": "cuda", "tensor_parallel": 2},
            NODES,
            ("cuda", {"num_cpus": 1, "num_gpus": 2}, 2),
        ),
        ({"device": "cpu"}, NODES, ("cpu", {"num_cpus": 8}, 3)),
        ({}, [HEAD, SMALL], ("cpu", {"num_cpus": 8}, 1)),
        ({"device": "cpu", "threads": 5}, NODES, ("cpu", {"num_cpus": 5}, 4)),
        ({"device": "cuda"}, [HEAD], ("cuda", {"num_cpus": 1, "num_gpus": 1}, 0)),
        ({}, [], ("cpu", {"num_cpus": 1}, 0)),
    ],
)
def test_places(settings, nodes, wanted):  # type: ignore[no-untyped-def]
    asks, model, count = place_on_nodes(nodes, replace(MODEL, **settings))
    assert (model.device, asks, count) == wanted


def test_engines_on_a_node_share_its_memory():  # type: ignore[no-untyped-def]
    _, model, _ = place_on_nodes([SMALL, LARGE], replace(MODEL, device="cpu", threads=4))
    assert model.memory_fraction == pytest.approx(0.7 / 4)


def test_a_tpu_is_refused():  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="--device tpu is not supported with --ray"):
        place_on_nodes(NODES, replace(MODEL, device="tpu"))


def groups(texts: list[tuple[str, ...]], count: int = 8) -> list[int]:
    divider = Divider(Plan({}, [InputFile("a.jsonl", 2**20, 0)], count, b""))
    return [divider.group(text, number) for number, text in enumerate(texts)]


def test_a_query_is_one_groups_unless_it_has_too_many_rows():  # type: ignore[no-untyped-def]
    """Small queries lie between the rows of a large one."""
    item = "x" * 1000
    texts = [("large" if n % 2 else f"small {n % 100}", item) for n in range(2000)]
    of_rows = groups(texts)
    places = [(query, group) for (query, _), group in zip(texts, of_rows, strict=True)]
    several = Counter(query for query, _ in set(places))
    assert several.pop("large") == 8  # a mebibyte over groups of 128 KiB
    assert set(several.values()) == {1}
    assert len(set(of_rows)) == 8
    assert of_rows == groups(texts)


def test_texts_without_queries_are_divided_by_their_beginnings():  # type: ignore[no-untyped-def]
    start = "a long instruction " * 20
    texts = [(f"{start if n % 2 else n}{n}",) for n in range(400)]
    of_rows = groups(texts)
    assert len({group for (text,), group in zip(texts, of_rows, strict=True) if start in text}) <= 3
    assert len(set(of_rows)) == 8
    assert len(start) * 50 < LEAST_BYTES


def test_a_file_of_another_store_is_copied_to_the_disk(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    info = store.get_file_info("in.jsonl")
    file = InputFile("in.jsonl", info.size, info.mtime_ns)
    with on_disk(store, file) as path:
        assert path.name == "in.jsonl"
        assert path != tmp_path / "in.jsonl"
        assert path.read_text() == "{}\n"
    assert not path.exists()
    (tmp_path / "in.jsonl").write_text("{} \n")
    with pytest.raises(ConfigError, match="has changed"), on_disk(store, file):
        pass


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [((1, "one"), "int64 vs string"), ((2**60 + 1, 0.5), "Integer value"), ((1, 0.5), "")],
)
def test_json_lines_become_parquet_only_if_every_value_fits(
    tmp_path: Path, numbers: tuple[object, ...], problem: str
) -> None:
    """Each number is in a file of its own, whose type is found alone."""
    options = BatchOptions(tmp_path, tmp_path / "out.parquet")
    rows = [[{"item": "a", "number": number}] for number in numbers]
    paths = [write_rows(tmp_path / f"{i}.jsonl", some) for i, some in enumerate(rows)]
    columns = [columns_of(InputFiles(JSON_LINES, (path,)), options) for path in paths]

    def read() -> list[object]:
        whole = schema_bytes(unified([*map(schema_of_bytes, columns)], "in"))
        plan = Plan({}, find_files(str(tmp_path)), 1, whole)
        files = range(len(plan.files))
        return [table for i in files for table in read_rows(str(tmp_path), i, plan, options, [0])]

    if problem:
        with pytest.raises(ConfigError, match=problem):
            read()
    else:
        assert len(read()) == len(numbers)
