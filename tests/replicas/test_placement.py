"""Promise: every replica has a device and its share of the machine, and wrong devices are named.
Several models share a device by plan, and are refused if they do not fit together."""

import os
from pathlib import Path

import pytest

from gpuscore.backends.common.plan import ENGINE_BYTES, MEMORY_FRACTION
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas import placement
from gpuscore.processes.replicas.placement import (
    VISIBLE,
    Needs,
    Sought,
    memory_parts,
    placements,
    places_of_all,
)

MODEL = ModelConfig()
MIB = 2**20
BESIDE = ENGINE_BYTES["cpu"]


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    """Eight cores, not in a row."""
    cores = {0, 1, 2, 3, 8, 9, 10, 11}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)


def test_without_devices_there_is_one_replica_as_before():
    (place,) = placements(ModelConfig(device="cpu", threads=3), None)
    assert place.model == ModelConfig(device="cpu", threads=3)
    assert (place.device, place.environment, place.cores) == ("cpu", {}, ())


def test_cpus_share_cores_and_memory():
    places = placements(MODEL, "cpu, cpu,cpu")
    assert [place.cores for place in places] == [(0, 1), (2, 3, 8), (9, 10, 11)]
    assert {place.model.device for place in places} == {"cpu"}
    assert sum(p.model.memory_fraction for p in places) == pytest.approx(MEMORY_FRACTION["cpu"])
    places = placements(ModelConfig(memory_fraction=0.4), "cpu,cpu")
    assert [place.model.memory_fraction for place in places] == [0.2, 0.2]
    sized = placements(ModelConfig(kv_cache_size=2**20), "cpu,cpu")
    assert {place.model.dtype for place in sized} == {"checkpoint"}  # nobody knows what fits
    assert [p.model.kv_cache_size for p in sized] == [2**20, 2**20]
    assert [p.model.memory_fraction for p in sized] == [None, None]


def test_each_gpu_is_the_only_one_that_its_replica_sees(monkeypatch):
    places = placements(MODEL, "cuda:0,cuda:3")
    assert [place.device for place in places] == ["cuda:0", "cuda:3"]
    assert [place.environment for place in places] == [{VISIBLE: "0"}, {VISIBLE: "3"}]
    assert {(place.model.device, place.cores) for place in places} == {("cuda", ())}
    monkeypatch.setenv(VISIBLE, "5, GPU-8a,7")
    places = placements(MODEL, "cuda:1,cuda:2")
    assert [place.environment for place in places] == [{VISIBLE: "GPU-8a"}, {VISIBLE: "7"}]


def test_ranks_get_gpus_that_follow_each_other(monkeypatch):
    places = placements(ModelConfig(tensor_parallel=2), "cuda:0,cuda:3,cuda:1,cuda:2")
    assert [place.device for place in places] == ["cuda:0+cuda:3", "cuda:1+cuda:2"]
    assert [place.environment for place in places] == [{VISIBLE: "0,3"}, {VISIBLE: "1,2"}]
    with pytest.raises(ConfigError, match="has 3 devices, which replicas of --tensor-parallel 2"):
        placements(ModelConfig(tensor_parallel=2), "cuda:0,cuda:1,cuda:2")


def test_all_is_every_gpu_that_torch_sees(monkeypatch):
    monkeypatch.setattr(placement, "_cuda_names", lambda: ["cuda:0", "cuda:1"])
    assert [place.device for place in placements(MODEL, "all")] == ["cuda:0", "cuda:1"]


@pytest.mark.slow  # it imports torch in a process of its own
def test_all_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="^--devices all: torch sees no CUDA device here$"):
        placements(MODEL, "all")


@pytest.mark.parametrize(
    ("devices", "model", "message"),
    [
        ("cpu,gpu", MODEL, "'gpu' is not cpu or cuda:N"),
        ("cuda", MODEL, "'cuda' is not cpu or cuda:N"),
        ("cpu,", MODEL, "'' is not cpu or cuda:N"),
        ("cuda:0,cpu", MODEL, "different kinds of devices"),
        ("cuda:0,cuda:0", MODEL, "named twice"),
        (",".join(["cpu"] * 9), MODEL, "9 engines on CPUs .* may use 8 cores"),
        ("cpu", ModelConfig(device="cpu"), "--devices cpu and --device cpu: set one of them"),
        ("cuda:0", ModelConfig(backend="jax"), "needs --backend torch"),
    ],
)
def test_wrong_devices(devices, model, message):
    with pytest.raises(ConfigError, match=message):
        placements(model, devices)


def test_a_gpu_that_is_not_visible(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4")
    with pytest.raises(ConfigError, match="there is no cuda:1, because .*=4 shows 1 devices"):
        placements(MODEL, "cuda:0,cuda:1")


def sought(count=2, **settings):
    return [Sought(name, Path(name), ModelConfig(name, **settings)) for name in "abcdef"[:count]]


def answering(kind, free, *needs):
    """Return what asks no process, with the devices that it was asked about."""
    asked = []

    def ask(models, place):
        asked.append(place.device)
        return [Needs(kind, weights, prompt, free) for weights, prompt in needs]

    return ask, asked


def test_each_gets_its_weights_a_prompt_and_an_equal_part_of_the_rest():
    free = 1000 * MIB + BESIDE
    needs = [Needs("cpu", 300 * MIB, 100 * MIB, free), Needs("cpu", 100 * MIB, 20 * MIB, free)]
    parts = memory_parts(["a", "b"], needs)
    assert parts == [640 * MIB, 360 * MIB]
    assert sum(parts) + BESIDE == free
    parts = memory_parts(["a", "b"], needs, limit=free - 100 * MIB)
    assert parts == [590 * MIB, 310 * MIB]
    assert memory_parts(["a", "b"], needs, limit=2 * free) == [640 * MIB, 360 * MIB]


def test_models_that_do_not_fit_are_refused_with_the_numbers():
    free = 500 * MIB + BESIDE
    needs = [Needs("cpu", 300 * MIB, 100 * MIB, free), Needs("cpu", 100 * MIB, 20 * MIB, free)]
    with pytest.raises(ConfigError) as refused:
        memory_parts(["first", "second"], needs)
    assert str(refused.value) == (
        "the models need 1,032.0 MiB together and may take 1,012.0 MiB of cpu memory: first "
        "300.0 MiB of weights and 100.0 MiB for one longest prompt, second 100.0 MiB of weights "
        "and 20.0 MiB for one longest prompt, and 512.0 MiB for their processes; serve fewer "
        "models, lower --max-model-len, or raise --memory-limit if it is set"
    )
    with pytest.raises(ConfigError, match=r"may take 900.0 MiB .*"):
        memory_parts(["first", "second"], needs, limit=900 * MIB)


def test_on_cpus_cores_are_divided_and_all_replicas_share_the_memory():
    free = 4096 * MIB
    ask, asked = answering("cpu", free, (100 * MIB, 10 * MIB), (200 * MIB, 20 * MIB))
    first, second = places_of_all(sought(device="cpu", memory_fraction=0.5), None, ask)
    assert [(p.device, p.cores, p.in_turn) for p in (*first, *second)] == [
        ("cpu", (0, 1, 2, 3), False),
        ("cpu", (8, 9, 10, 11), False),
    ]
    assert {p.model.memory_fraction for p in (*first, *second)} == {0.5}, "of each one's own part"
    assert sum(p.model.memory_limit for p in (*first, *second)) + BESIDE == free
    both = places_of_all(sought(memory_fraction=0.5), "cpu,cpu", ask)
    assert [p.cores for places in both for p in places] == [(0, 1), (2, 3), (8, 9), (10, 11)]
    assert {p.model.memory_fraction for places in both for p in places} == {0.5}
    limits = [p.model.memory_limit for places in both for p in places]
    assert limits[0] == limits[1] == limits[2] - 110 * MIB == limits[3] - 110 * MIB
    assert sum(limits) + 3 * BESIDE == free
    assert asked == ["cpu", "cpu"], "once for each plan"
    with pytest.raises(ConfigError, match="10 engines on CPUs .* may use 8 cores"):
        places_of_all(sought(5), "cpu,cpu", answering("cpu", 2**40, *[(1, 1)] * 5)[0])


def test_every_gpu_is_planned_by_itself_and_loads_one_model_after_the_other():
    ask, asked = answering("cuda", 9000 * MIB, (1000 * MIB, 100 * MIB), (2000 * MIB, 100 * MIB))
    both = places_of_all(sought(max_model_len=9), "cuda:0,cuda:3", ask)
    assert asked == ["cuda:0", "cuda:3"]
    for name, places in zip("ab", both, strict=True):
        assert [p.device for p in places] == ["cuda:0", "cuda:3"]
        assert [p.environment[VISIBLE] for p in places] == ["0", "3"]
        assert {(p.model.model, p.model.max_model_len, p.in_turn, p.cores) for p in places} == {
            (name, 9, True, ())
        }
    limits = [places[0].model.memory_limit for places in both]
    assert limits[1] - limits[0] == 1000 * MIB
    assert sum(limits) + ENGINE_BYTES["cuda"] == 9000 * MIB


def test_one_model_is_placed_as_before():
    def never(models, place):
        raise AssertionError("nothing is shared")

    (places,) = places_of_all(sought(1), "cpu,cpu", never)
    assert [p.cores for p in places] == [(0, 1, 2, 3), (8, 9, 10, 11)]
    assert {p.model.memory_limit for p in places} == {None}
