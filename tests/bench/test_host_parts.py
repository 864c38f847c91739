"""Promise: bench/host_parts.py runs with today's engine and launcher, and times every part."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import host_parts

PARTS = {"plan and pack", "tile tables", "launch", "collect", "backend", "build", "engine"}


@pytest.fixture
def as_many_threads_as_before():
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("as_many_threads_as_before")
@pytest.mark.parametrize("workload", ["300", "a"])
def test_every_part_is_timed(tmp_path, workload):
    path = tmp_path / "parts.jsonl"
    assert host_parts.main([f"--workload={workload}", "--rounds=1", f"--results={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["workload"] for row in rows} == {workload}
    assert {row["part"] for row in rows} >= PARTS
    assert all(row["median, us"] > 0 for row in rows)
