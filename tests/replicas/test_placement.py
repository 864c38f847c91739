"""Promise: every replica has a device and its share of the machine, and wrong devices are named.
Several models share a device, and are refused if they do not fit together."""

import os
from pathlib import Path

import pytest

from gpuscore.backends.common.estimate import plan_memory
from gpuscore.config import ModelConfig
from gpuscore.config.served import ServedConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas import placement
from gpuscore.processes.replicas.placement import (
    VISIBLE,
    check_together,
    places_of_all,
)

MODEL = ModelConfig()
MIB = 2**20
SIZED = ModelConfig(kv_cache_size=1)


def placements(model, devices):
    (places,) = places_of_all([ServedConfig("one", model, directory=Path("nowhere"))], devices)
    return places


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


def test_cpus_share_cores_and_need_a_size():
    places = placements(ModelConfig(kv_cache_size=MIB), "cpu, cpu,cpu")
    assert [place.cores for place in places] == [(0, 1), (2, 3, 8), (9, 10, 11)]
    assert {(p.model.device, p.model.kv_cache_size) for p in places} == {("cpu", MIB)}
    (place,) = placements(MODEL, "cpu")
    assert (place.model, place.cores) == (ModelConfig(device="cpu"), ())
    with pytest.raises(ConfigError, match="^3 engines on one device need --kv-cache-size"):
        placements(MODEL, "cpu,cpu,cpu")
    with pytest.raises(ConfigError, match=r"need .* 2,097,152.0 MiB of ke.*, 2 times, and 1,024.0"):
        placements(ModelConfig(kv_cache_size=2**41), "cpu,cpu")


def test_each_gpu_is_the_only_one_that_its_replica_sees(monkeypatch):
    places = placements(MODEL, "cuda:0,cuda:3")
    assert [place.device for place in places] == ["cuda:0", "cuda:3"]
    assert [place.environment for place in places] == [{VISIBLE: "0"}, {VISIBLE: "3"}]
    assert {(place.model.device, place.cores) for place in places} == {("cuda", ())}
    monkeypatch.setenv(VISIBLE, "5,7")
    with pytest.raises(ConfigError, match=f"all devices of the machine: unset {VISIBLE}=5,7$"):
        placements(MODEL, "cuda:0,cuda:1")


def test_ranks_get_gpus_that_follow_each_other(monkeypatch):
    places = placements(ModelConfig(tensor_parallel=2), "cuda:0,cuda:3,cuda:1,cuda:2")
    assert [place.device for place in places] == ["cuda:0+cuda:3", "cuda:1+cuda:2"]
    assert [place.environment for place in places] == [{VISIBLE: "0,3"}, {VISIBLE: "1,2"}]
    with pytest.raises(ConfigError, match="has 3 devices, which replicas of --tensor-parallel 2"):
        placements(ModelConfig(tensor_parallel=2), "cuda:0,cuda:1,cuda:2")


def test_all_is_every_gpu_that_torch_sees(monkeypatch):
    monkeypatch.setattr(placement, "free_cuda", lambda: [0, 0])
    assert [place.device for place in placements(MODEL, "all")] == ["cuda:0", "cuda:1"]


@pytest.mark.slow  # it imports torch in a process of its own
def test_all_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="^--devices all: torch sees no CUDA device here$"):
        placements(MODEL, "all")


@pytest.mark.parametrize(
    ("devices", "model", "message"),
    [
        ("cpu,gpu", MODEL, "name different CUDA devices"),
        ("cuda", MODEL, "such as cuda:0,cuda:1, or all"),
        ("cpu,", MODEL, "or cpu for each engine"),
        ("cuda:0,cpu", MODEL, "not both kinds"),
        ("cuda:0,cuda:0", MODEL, "name different CUDA devices"),
        (
            ",".join(["cpu"] * 9),
            ModelConfig(kv_cache_size=1),
            "9 engines on CPUs .* may use 8 cores",
        ),
        ("cpu", ModelConfig(device="cpu"), "--devices cpu and --device cpu: set one of them"),
        ("cuda:0", ModelConfig(backend="jax"), "needs --backend torch"),
    ],
)
def test_wrong_devices(devices, model, message):
    with pytest.raises(ConfigError, match=message):
        placements(model, devices)


def sought(count=2, **settings):
    settings = {"kv_cache_size": 100 * MIB} | settings
    return [
        ServedConfig(name, ModelConfig(name, **settings), directory=Path(name))
        for name in "abcdef"[:count]
    ]


@pytest.mark.parametrize("copies", [1, 2])
def test_models_that_do_not_fit_together_are_refused_with_the_sum(tmp_path, copies):
    models = []
    for name, size, parts in (("first", 3 * MIB, 1), ("second", MIB, 2)):
        (tmp_path / name).mkdir()
        for part in range(parts):
            (tmp_path / name / f"{part}.safetensors").write_bytes(bytes(size // parts))
        cache = ModelConfig(name, kv_cache_size=10 * MIB)
        models.append(ServedConfig(name, cache, directory=tmp_path / name))
    total = copies * (2 * 512 + 2 * 10 + 4)
    check_together(models, copies, total * MIB, on_cpu=True)
    with pytest.raises(ConfigError) as refused:
        check_together(models, copies, total * MIB - 1, on_cpu=True)
    assert str(refused.value) == (
        f"the engines need {total:,}.0 MiB of memory together and {total:,}.0 MiB are free: first "
        "3.0 MiB of weights and 10.0 MiB of keys and values, second 1.0 MiB of weights and "
        f"10.0 MiB of keys and values{', 2 times' if copies > 1 else ''}, and "
        f"{copies * 1024:,}.0 MiB for their processes and batches; serve fewer models or lower "
        "--kv-cache-size"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_size": None}, "2 engines on one device need --kv-cache-size"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2 is not supported with several engines"),
        ({"device": "cpu", "kv_cache_size": 2**50}, "the engines need .* 1,073,741,824.0 MiB of k"),
    ],
)
def test_settings_of_several_models(settings, message):
    with pytest.raises(ConfigError, match=message):
        places_of_all(sought(**settings), None)


def test_on_cpus_cores_are_divided():
    first, second = places_of_all(sought(device="cpu"), None)
    assert [(p.device, p.cores) for p in (*first, *second)] == [
        ("cpu", (0, 1, 2, 3)),
        ("cpu", (8, 9, 10, 11)),
    ]
    both = places_of_all(sought(), "cpu,cpu")
    assert [p.cores for places in both for p in places] == [(0, 1), (2, 3), (8, 9), (10, 11)]
    assert {p.model.kv_cache_size for places in both for p in places} == {100 * MIB}
    with pytest.raises(ConfigError, match="10 engines on CPUs .* may use 8 cores"):
        places_of_all(sought(5, kv_cache_size=1), "cpu,cpu")


def test_on_gpus_the_sum_is_held_against_the_fullest_one(tiny_model, monkeypatch):
    """Weights, context and the largest batch are estimated from config.json."""
    directory, _ = tiny_model("qwen3")
    settings = ModelConfig("m", max_batch_tokens=512, kv_cache_size=100 * MIB)
    models = [ServedConfig(name, settings, directory=directory) for name in "ab"]
    plan = plan_memory(directory, settings, 0)
    each = plan.context + plan.batch_bytes + plan.weight_bytes + 100 * MIB
    free = [2 * each, 0, 0, 2 * each]
    monkeypatch.setattr(placement, "free_cuda", lambda: free)
    both = places_of_all(models, "cuda:0,cuda:3")
    for places in both:
        assert [p.device for p in places] == ["cuda:0", "cuda:3"]
        assert [p.environment[VISIBLE] for p in places] == ["0", "3"]
        assert {(p.model.device, p.model.dtype, p.cores) for p in places} == {("cuda", "auto", ())}
    free[3] -= 1
    with pytest.raises(ConfigError, match="^the engines need .* a .* b .* lower --kv-cache-size$"):
        places_of_all(models, "cuda:0,cuda:3")
    places_of_all(models, "cuda:0")
    places_of_all(models[:1], "cuda:1")  # one engine measures for itself


def test_one_model_is_placed_as_before():
    (places,) = places_of_all(sought(1, kv_cache_size=None), "cuda:0,cuda:1")
    assert [p.device for p in places] == ["cuda:0", "cuda:1"]
