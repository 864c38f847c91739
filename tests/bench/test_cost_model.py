"""Promise: predicted times follow from one half of the published measurements alone, and a model
with an error over 20 % on the other half chooses nothing."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import predict
from ceiling import operations
from cost_model import search
from cost_model.cards import Card, read_cards
from cost_model.cycles import Loop, Overlap, iteration, parts
from cost_model.fit import calibrate
from cost_model.forward import launches, planned
from cost_model.judge import Errors, Refused, interval, judge, quantile
from cost_model.model import LAUNCH_US, Model
from cost_model.ours import Code, scheduled, shipped_arch, table_cycles
from cost_model.products import product_cycles
from cost_model.published import (
    SHORTEST_US,
    Attention,
    Measurement,
    Product,
    Rowwise,
    Tile,
    halves,
    read_published,
)
from report import table
from scenarios import QWEN3_06B, SHAPES, Workload

from gpuscore_kernels.extend_attention import TileConfig, TileShape
from gpuscore_kernels.extend_attention.layout import NUM_ROWS
from kernel_code.facts import CodeFacts, LoopFacts

ROOT = Path(__file__).parents[2]
CARD = Card("one", "One", 90, 4, 1.0, 1000, 500, "nowhere")
OVERLAP = Overlap(tensor=0.8, exposed=0.5, sync=100, startup=3000)
MODEL = Model({"one": 0.75}, 2000, 0.5, {"wgmma": OVERLAP})
LOOP = Loop(flop=100_000, instructions=240, special=640, copied=800, trips=0)
PLACE = {(90, 1000): 5}


def errors(worst, group="attention wgmma", places=PLACE):
    return Errors(group, 20, worst / 2, worst, worst, places)


@pytest.mark.parametrize(
    ("overlap", "trips", "cycles"),
    [
        (Overlap(1, 0, 0, 0), 0, 100),  # the busiest of tensor 100, special 40, issue 60, memory 20
        (Overlap(1, 1, 0, 0), 0, 160),  # tensor and issue; copies are a whole iteration ahead
        (Overlap(1, 1, 0, 0), 1, 100 + 60 + 20 + 262),
        (Overlap(1, 1, 0, 0), 2, 100 + 60 + 20 + 2 * 262),
        (Overlap(0.5, 0.5, 7, 999), 0, 200 + 0.5 * 60 + 7),
    ],
)
def test_an_iteration_is_between_its_busiest_part_and_the_sum(overlap, trips, cycles):
    loop = replace(LOOP, trips=trips)
    assert iteration(loop, CARD, overlap) == pytest.approx(cycles)
    assert parts(loop, CARD, overlap).bound == "tensor"
    assert parts(replace(loop, special=6400), CARD, overlap).bound == "special"


@pytest.mark.parametrize(
    ("multiprocessors", "overhead", "cycles"),
    [
        (4, 0, 2 * 65_536),  # 8 tiles of 256 x 128
        (3, 0, 43 * 4096),  # 64 x 64 in two halves: 128 tiles
        (3, 10_000, 3 * (65_536 + 10_000)),
    ],
)
def test_a_product_takes_waves_of_its_best_tile(multiprocessors, overhead, cycles):
    card = replace(CARD, multiprocessors=multiprocessors)
    assert product_cycles(Product(512, 512, 1000), card, overhead) == cycles


def test_cycles_and_bytes_become_microseconds():
    assert MODEL.microseconds(75_000, CARD) == pytest.approx(100 + LAUNCH_US)
    assert MODEL.predict(Rowwise(25e6), CARD) == pytest.approx(100 + LAUNCH_US)
    slow = replace(CARD, memory_gb_s=1)
    assert MODEL.predict(Product(512, 512, 1000), slow) == pytest.approx(
        2 * (2 * 512 * 1000 + 512 * 512) / 500 + LAUNCH_US
    )


def test_jobs_start_in_order_on_the_first_free_server():
    assert scheduled([5, 4, 3, 3], 2) == 8
    assert scheduled([5, 4, 3, 3], 1) == 15
    assert scheduled([5, 4, 3, 3], 9) == 5


def test_units_of_published_values(tmp_path):
    path = tmp_path / "table.toml"
    about = 'card = "one"\nkernel = "some"\nsource = "https://example.org"\n'
    attention = 'kind = "attention"\ndim = 128\ncausal = true\nheads = 16\ntokens = 16384\n'
    attention += 'tile = [128, 64, 8]\nunit = "TFLOP/s"\npoints = [[1024, 500]]\n'
    product = 'kind = "product"\nunit = "TFLOP/s"\npoints = [[4096, 4096, 4096, 700]]\n'
    rowwise = 'kind = "rowwise"\nunit = "UNIT"\npoints = [[1000000, 0.5]]\n'
    rows = [f"[[series]]\n{about}{row}" for row in (attention, product, rowwise)]
    path.write_text("\n".join(rows).replace("UNIT", "ms"))
    found = {one.kind: one for one in read_published(path)}
    # 16 sequences, 16 heads, half of 1024 x 1024 pairs, 4 x 128 operations of each
    assert found["attention"].us == pytest.approx(16 * 16 * 1024**2 / 2 * 4 * 128 / 500e6)
    assert found["product"].us == pytest.approx(2 * 4096**3 / 700e6)
    assert found["rowwise"].us == 500
    path.write_text(rows[2].replace("UNIT", "TFLOP/s"))
    with pytest.raises(ValueError, match="supported"):
        read_published(path)


def test_every_published_measurement_has_a_source_and_a_known_card():
    cards, measurements = read_cards(), read_published()
    assert len(measurements) > 100
    for one in measurements:
        assert one.card in cards
        assert one.us >= SHORTEST_US
        assert one.source.startswith("https://")
    assert all(card.source.startswith("https://") for card in cards.values())
    assert {key for key, card in cards.items() if card.predicted} == {
        *("h100", "h200", "l4", "rtx-pro-6000")
    }


def test_halves_alternate_whatever_the_order_of_the_rows():
    measurements = read_published()
    calibration, held_out = halves(measurements)
    assert not set(calibration) & set(held_out)
    assert set(calibration) | set(held_out) == set(measurements)
    assert 0 <= len(calibration) - len(held_out) <= 3
    assert halves(measurements[::-1]) == (calibration, held_out)
    products = [one for one in measurements if one.kind == "product"]
    assert [one in calibration for one in products[:4]] == [True, False, True, False]


def synthetic():
    """Measurements that a model with known parameters predicts exactly."""
    tile = Tile(128, 64, 8)
    works = [Product(2048 * n, 1024, 4096) for n in range(1, 7)]
    works += [Rowwise(1e8 * n) for n in range(1, 5)]
    works += [
        Attention(dim, causal, 16, 8, 256 * n, replace(tile, keys=keys))
        for dim in (64, 128)
        for causal in (False, True)
        for n in (1, 2, 5, 16)
        for keys in (32, 64)
    ]
    return [Measurement("one", work, MODEL.predict(work, CARD), "made", "here") for work in works]


def test_what_is_held_out_changes_the_error_and_not_the_model():
    measurements, cards = synthetic(), {"one": CARD}
    model, found = judge(measurements, cards)
    assert model.num_parameters == 1 + 2 + 4
    assert {group: one.count for group, one in found.items()} == {
        **{"attention wgmma": 16, "product": 3, "rowwise": 2}
    }
    assert max(one.ninetieth for one in found.values()) < 0.02
    held_out = halves(measurements)[1]
    doubled = [replace(one, us=one.us * 2) if one in held_out else one for one in measurements]
    other, worse = judge(doubled, cards)
    assert other == model
    for one in worse.values():
        assert one.median == pytest.approx(0.5, abs=0.02)
        assert one.places == {(90, 1000): one.count}
    assert calibrate(doubled, cards) != model


@pytest.mark.slow
def test_the_documented_errors_are_those_that_the_command_prints(tmp_path, monkeypatch, capsys):
    out = tmp_path / "predictions.jsonl"
    monkeypatch.setattr(sys, "argv", ["predict.py", f"--out={out}", "--search"])
    predict.main()
    printed, kept = capsys.readouterr().out, json.loads(out.read_text())
    readme = (ROOT / "bench" / "README.md").read_text()
    assert table(kept["errors"]) in printed
    assert table(kept["errors"]) in readme
    assert f"{kept['model']['parameters']} fitted parameters" in readme
    assert {choice.split(". ")[0] for choice in kept["choices"].values()} == {"no choice"}


def test_quantiles_are_of_the_values():
    assert quantile([4, 1, 3, 2], 0.5) == 2
    assert quantile(range(10, 0, -1), 0.9) == 9
    assert quantile([7], 0.9) == 7


def test_intervals_have_the_error_and_on_unmeasured_cores_the_largest():
    found = {one.group: one for one in (errors(0.25), errors(0.1, "attention mma.sync", {}))}
    assert interval(100, found, "attention wgmma", CARD) == pytest.approx((80, 133.3333))
    assert interval(100, found, "attention mma.sync", CARD) == pytest.approx((80, 133.3333))
    known = found | {"attention mma.sync": errors(0.1, "attention mma.sync")}
    assert interval(110, known, "attention mma.sync", CARD) == pytest.approx((100, 122.2222))
    unseen = {"product": replace(errors(0.1, "product"), transfer=float("nan"))}
    assert interval(110, unseen, "product", CARD) == pytest.approx((100, 122.2222))
    hopeless = {"product": errors(1.2, "product")}
    assert interval(110, hopeless, "product", CARD) == pytest.approx((50, float("inf")))


def loop_facts(in_flight, awaited, **opcodes):
    named = {"MUFU.EX2": 34, "LDGSTS.E.BYPASS.128": 8, "IADD3": 300} | opcodes
    return LoopFacts("for", 1, in_flight, 2, 16, awaited, 0, named)


def code_facts(*, stack=0, shared=65536):
    products = {"HGMMA.64x64x16.F32.BF16": 12}
    loops = [
        loop_facts(0, 1, **products),
        loop_facts(2, 1, **products),
        loop_facts(None, 0),
        loop_facts(0, 0, **products),
    ]
    return CodeFacts("3.6.0", 90, 8, 200, stack, shared, tuple(loops), {})


def test_facts_of_code_become_loops():
    code = Code.of(code_facts())
    assert [loop.trips for loop in code.loops] == [2, 0, 1]
    assert code.pool == Loop(
        flop=12 * 2 * 64 * 64 * 16 / 4 * 8,
        instructions=8 * 354,
        special=32 * 8 * 34,
        copied=8 * 8 * 32 * 16,
        trips=2,
    )
    facts = code_facts()
    with pytest.raises(ValueError, match="3 loops"):
        Code.of(replace(facts, loops=facts.loops[1:]))
    assert [shipped_arch(replace(CARD, arch=arch)) for arch in (86, 90, 103)] == [80, 90, 90]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (errors(0.21), "21%"),
        (replace(errors(0.1), transfer=0.3), "30%"),
        (replace(errors(0.1), ninetieth=0.3), "30%"),
        (replace(errors(0.1), ninetieth=float("nan"), transfer=float("nan")), "nan%"),
        (errors(0.1, places={(90, 1000): 4, (80, 1000): 9}), "4 held-out"),
    ],
)
def test_a_model_that_errs_or_that_nothing_confirms_does_not_choose(found, why):
    def compiled(config):
        raise AssertionError("nothing may be compiled")

    with pytest.raises(Refused, match=why):
        search.choose([TileConfig(128, 64, 32, 8, 2)], compiled, compiled, found, CARD)


def test_a_good_model_chooses_the_fastest_that_fits_without_the_stack():
    shipped = TileConfig(128, 64, 32, 8, 2)
    configs = list(search.candidates(shipped))
    assert configs[0] == shipped
    assert len(set(configs)) == len(configs) == 24

    def compiled(config):
        big = 300_000 if config.num_stages == 4 else 65536
        return code_facts(stack=8 * (config.num_stages == 3), shared=big)

    def slower_with_rows(config, _):
        return 1000 * config.rows - config.keys - config.num_warps

    ranked = search.choose(configs, compiled, slower_with_rows, errors(0.2), CARD)
    assert {config.num_stages for _, config in ranked} == {2}
    assert ranked[0] == (64_000 - 64 - 8, TileConfig(64, 64, 32, 8, 2))


def test_attention_runs_every_tile_of_every_head():
    shape, code = SHAPES["small"], Code(*([LOOP] * 3))
    (batch,) = planned(Workload(130, 3, 20), shape)
    tile = TileShape(64, 64, 32)
    table = next(one for one in launches(batch, shape, tile) if one.name == "attention").work
    rows = table.tiles[:, NUM_ROWS]
    assert rows.sum() == 190
    alone = replace(CARD, multiprocessors=1)
    free = replace(OVERLAP, startup=1.0)
    one = iteration(LOOP, alone, free)
    iterations = (table_cycles(table, code, 2, alone, free) - 2 * (rows > 0).sum()) / one / 2
    # Tiles of keys that the query's three blocks see: 0 + 2, 1 + 2 and 2 + 1 (whole ones of 64 and
    # masked ones of 32); the items' block: 2 + 1 of the query and one of each item.
    assert iterations == pytest.approx(5 + 9)
    doubled = table_cycles(table, code, 4, alone, free)
    assert doubled == pytest.approx(2 * table_cycles(table, code, 2, alone, free))


@pytest.mark.parametrize("cached", [0, 1984])
def test_the_list_of_kernels_has_the_counted_operations(cached):
    shape = QWEN3_06B | {"num_key_value_heads": 4}
    workload = Workload(1984, 500, 20, cached=cached)
    (batch,) = planned(workload, shape)
    assert batch.num_tokens == workload.tokens
    found = list(launches(batch, shape, TileShape(64, 64, 32)))
    products = [one for one in found if isinstance(one.work, Product)]
    head = sum(one.count * one.work.flop for one in products if one.name == "label head")
    everything = sum(one.count * one.work.flop for one in products)
    sizes = workload.query_len, workload.num_items, workload.item_len, workload.cached
    counted = operations(shape, *sizes)
    assert head == counted["head"]
    assert everything - head == pytest.approx(counted["linear"])
    attention = [one.count for one in found if one.name.startswith("attention")]
    assert attention == [shape["num_hidden_layers"] - 1, 1]


def test_small_batches_have_the_padding_of_their_graph():
    shape = QWEN3_06B
    (batch,) = planned(Workload(120, 10, 180), shape)
    found = list(launches(batch, shape, TileShape(32, 64, 32)))
    rows = {one.name: one.work.rows for one in found if isinstance(one.work, Product)}
    assert (batch.num_tokens, rows["product qkv"]) == (1920, 2000)
    assert (rows["products, last layer"], rows["label head"]) == (16, 10)


def test_everything_printed_is_marked_as_predicted_and_has_units(tmp_path, monkeypatch, capsys):
    model = Model(
        dict.fromkeys(("h100", "l4", "rtx-pro-6000"), 0.75),
        2000,
        0.5,
        {"wgmma": OVERLAP, "mma.sync": OVERLAP},
    )
    groups = ("attention wgmma", "attention mma.sync", "product", "rowwise")
    found = {group: errors(0.25, group) for group in groups}
    monkeypatch.setattr(predict, "judge", lambda measurements, cards: (model, found))
    monkeypatch.setattr(predict, "facts_for", lambda card, config, group: code_facts())
    out = tmp_path / "predictions.jsonl"
    monkeypatch.setattr(sys, "argv", ["predict.py", f"--out={out}"])
    predict.main()
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and line[0] not in "|/"]
    kinds = ("PREDICTED, not measured", "Configuration of extend_attention")
    assert all(title.startswith(kinds) for title in titles)
    assert printed.count("no choice. attention") == 4
    assert printed.count("| h100 | packed | ") == 1
    (line,) = out.read_text().splitlines()
    kept = json.loads(line)
    assert f"code of Triton {kept['triton']}" in printed
    assert kept["label"] == "PREDICTED, not measured"
    places = [(one["card"], one["workload"]) for one in kept["predictions"]]
    cards = ("h100", "h200", "l4", "rtx-pro-6000")
    assert places == [(card, w) for card in cards for w in ("a", "a cached", "b cached", "d")]
    for one in kept["predictions"]:
        assert one["predicted ms"] == pytest.approx(
            sum(kernel["predicted ms"] for kernel in one["kernels"]), abs=0.01
        )
        assert one["low ms"] == pytest.approx(one["predicted ms"] / 1.25, rel=0.01)
        assert one["high ms"] == pytest.approx(one["predicted ms"] / 0.75, rel=0.01)
        assert one["share of floor"] == pytest.approx(
            one["floor ms"] / one["predicted ms"], abs=0.001
        )
    a = kept["predictions"][0]
    rate = operations(QWEN3_06B, 2000, 500, 20)["attention"] / 1e9
    attention = sum(k["predicted ms"] for k in a["kernels"] if k["kernel"].startswith("attention"))
    assert a["attention TFLOP/s"]["predicted"] == pytest.approx(rate / attention, rel=0.01)
    # 12,000 rows, and a floor of 14.6 TFLOP at three quarters of the boost clock's rate
    assert a["floor ms"] == pytest.approx(15.4 / 0.75 / 0.9895, rel=0.1)
