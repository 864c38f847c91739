"""Promise: several models share a device by plan, and are refused if they do not fit together."""

from pathlib import Path

import pytest

from gpuscore.backends.common.plan import ENGINE_BYTES
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas import placement
from gpuscore.processes.replicas.placement import Needs, Sought, memory_parts, places_of_all

MIB = 2**20
BESIDE = ENGINE_BYTES["cpu"]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(placement, "_cores", lambda: list(range(8)))
    monkeypatch.delenv(placement.VISIBLE, raising=False)


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
    one, two = places_of_all(sought(device="cpu", memory_fraction=0.5), None, ask)
    assert [(p.device, p.cores, p.in_turn) for p in (*one, *two)] == [
        ("cpu", (0, 1, 2, 3), False),
        ("cpu", (4, 5, 6, 7), False),
    ]
    assert {p.model.memory_fraction for p in (*one, *two)} == {0.5}, "of each one's own part"
    assert sum(p.model.memory_limit for p in (*one, *two)) + BESIDE == free
    both = places_of_all(sought(memory_fraction=0.5), "cpu,cpu", ask)
    assert [p.cores for places in both for p in places] == [(0, 1), (2, 3), (4, 5), (6, 7)]
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
        assert [p.environment[placement.VISIBLE] for p in places] == ["0", "3"]
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
    assert [p.cores for p in places] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {p.model.memory_limit for p in places} == {None}
