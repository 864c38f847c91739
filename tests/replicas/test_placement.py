"""Promise: every replica has a device and its share of the machine, and wrong devices are named.
Several models share a device, and are refused if they do not fit together."""

import os
from pathlib import Path

import pytest

from gpuscore.backends.common.plan import MEMORY_FRACTION
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas import placement
from gpuscore.processes.replicas.placement import (
    VISIBLE,
    Sought,
    check_together,
    placements,
    places_of_all,
)

MODEL = ModelConfig()
MIB = 2**20


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
    settings = {"kv_cache_size": 100 * MIB} | settings
    return [Sought(name, Path(name), ModelConfig(name, **settings)) for name in "abcdef"[:count]]


@pytest.mark.parametrize("replicas", [1, 2])
def test_models_that_do_not_fit_together_are_refused_with_the_sum(tmp_path, replicas):
    models = []
    for name, size, parts in (("first", 3 * MIB, 1), ("second", MIB, 2)):
        (tmp_path / name).mkdir()
        for part in range(parts):
            (tmp_path / name / f"{part}.safetensors").write_bytes(bytes(size // parts))
        cache = ModelConfig(name, kv_cache_size=10 * MIB)
        models.append(Sought(name, tmp_path / name, cache))
    total = replicas * (2 * 512 + 2 * 10 + 4)
    check_together(models, replicas, total * MIB)
    with pytest.raises(ConfigError) as refused:
        check_together(models, replicas, total * MIB - 1)
    assert str(refused.value) == (
        f"the models need {total:,}.0 MiB of memory together and {total:,}.0 MiB are free: first "
        "3.0 MiB of weights and 10.0 MiB of keys and values, second 1.0 MiB of weights and "
        f"10.0 MiB of keys and values{', 2 times' if replicas > 1 else ''}, and "
        f"{replicas * 1024:,}.0 MiB for their processes; serve fewer models or lower "
        "--kv-cache-size"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_size": None}, "2 models need --kv-cache-size"),
        ({"device": "cpu", "kv_cache_size": 2**50}, "the models need .* 1,073,741,824.0 MiB of ke"),
    ],
)
def test_settings_of_several_models(settings, message):
    with pytest.raises(ConfigError, match=message):
        places_of_all(sought(**settings), None)


def test_on_cpus_cores_are_divided_and_nothing_is_measured():
    first, second = places_of_all(sought(device="cpu"), None)
    assert [(p.device, p.cores, p.in_turn) for p in (*first, *second)] == [
        ("cpu", (0, 1, 2, 3), False),
        ("cpu", (8, 9, 10, 11), False),
    ]
    both = places_of_all(sought(), "cpu,cpu")
    assert [p.cores for places in both for p in places] == [(0, 1), (2, 3), (8, 9), (10, 11)]
    assert {(p.model.dtype, p.model.kv_cache_size) for places in both for p in places} == {
        ("checkpoint", 100 * MIB)
    }
    with pytest.raises(ConfigError, match="10 engines on CPUs .* may use 8 cores"):
        places_of_all(sought(5, kv_cache_size=1), "cpu,cpu")


def test_on_a_gpu_one_model_loads_after_the_other():
    both = places_of_all(sought(max_model_len=9, kv_cache_size=2**50), "cuda:0,cuda:3")
    for name, places in zip("ab", both, strict=True):
        assert [p.device for p in places] == ["cuda:0", "cuda:3"]
        assert [p.environment[VISIBLE] for p in places] == ["0", "3"]
        assert {(p.model.model, p.model.max_model_len, p.in_turn, p.cores) for p in places} == {
            (name, 9, True, ())
        }


def test_one_model_is_placed_as_before():
    (places,) = places_of_all(sought(1, kv_cache_size=None), "cpu,cpu")
    assert [p.cores for p in places] == [(0, 1, 2, 3), (8, 9, 10, 11)]
