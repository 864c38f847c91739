"""Promise: predicted times of `--tensor-parallel` count what real ranks send, wait for and compute,
and one rank is the prediction for one card."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import predict
import predict_ranks
from cost_model.cards import Card, read_cards
from cost_model.cycles import Loop, Overlap
from cost_model.forward import launches, planned
from cost_model.judge import Errors
from cost_model.links import LARGE, Exchange, Link, between, read_links
from cost_model.model import Model
from cost_model.ours import Code
from cost_model.prediction import Predictor
from cost_model.published import Product
from cost_model.ranks import exchanges, part_of
from cost_model.shared import (
    HANDED_BYTES_PER_US,
    HANDED_US,
    HOST_CALL_US,
    HOST_LAYER_US,
    SWITCH_US,
    handing,
    on_ranks,
    why_not,
)
from gpu_work import GOALS, Goal
from scenarios import QWEN3_32B, SHAPES, Workload

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch.group import RankGroup
from gpuscore.backends.torch.ranks.messages import words_of
from gpuscore.config import ModelConfig
from gpuscore_kernels.extend_attention import TileShape
from support.batches import in_one_batch

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MEASURED = RESULTS / "gpu-2026-11-23T070959Z.json"
CARD = Card("one", "One", 90, 4, 1.0, 1000, 500, "nowhere")
OVERLAP = Overlap(tensor=0.8, exposed=0.5, sync=100, startup=3000)
MODEL = Model({"one": 0.75}, 2000, 0.5, {"wgmma": OVERLAP})
CODE = Code(*([Loop(flop=100_000, instructions=240, special=640, copied=800, trips=0)] * 3))
ERRORS = {
    group: Errors(group, 9, 0.1, 0.25, 0.25, {(90, 1000): 5})
    for group in ("attention wgmma", "product", "rowwise")
}
TILE = TileShape(32, 64, 32)
PREDICTOR = Predictor(MODEL, ERRORS, CARD, CODE, TILE)
TABLE = [(1000, 10.0), (100_000, 10.0), (10_000_000, 1000.0)]
LINK = Link("some", {(kind, 2): TABLE for kind in ("all-reduce", "all-gather")})
CHECKED = Link(
    "checked", LINK.tables, [("all-reduce", 2, 2000, 12.5), ("all-reduce", 2, 10_000_000, 800.0)]
)
GOAL = Goal("some", Workload(130, 3, 20))


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_one_rank_is_the_prediction_for_one_card(goal):
    shape = SHAPES["small"]
    found = on_ranks(PREDICTOR, LINK, CHECKED, goal, shape, 1)
    assert found.forward == PREDICTOR.forward(goal, shape)
    alone = found.forward.us, found.forward.low, found.forward.high
    assert (found.us, found.low, found.high) == alone
    assert found.exchanges == ()
    kernels = [
        one for batch in planned(goal.workload, shape) for one in launches(batch, shape, TILE)
    ]
    assert found.us == pytest.approx(
        sum(one.count * PREDICTOR.kernel(one.work, shape)[0] for one in kernels)
    )


def test_two_ranks_send_what_the_model_counts(tiny_model, monkeypatch):
    directory, _ = tiny_model("qwen3")
    sent: Counter[tuple[str, int]] = Counter()

    def counted(kind, call):
        def run(group, x):
            sent[kind, x.numel() * x.element_size()] += 1
            return call(group, x)

        return run

    monkeypatch.setattr(RankGroup, "sum", counted("all-reduce", RankGroup.sum))
    monkeypatch.setattr(RankGroup, "gather", counted("all-gather", RankGroup.gather))
    config = ModelConfig(str(directory), device="cpu", tensor_parallel=2, max_batch_tokens=64)
    backend = create_backend(plan_backend(directory, config))
    try:
        batch = in_one_batch([1, 2, 3, 4, 5], [[6, 7], [8], [9, 3, 1]], [3, 17])
        for num_top in (0, 2):
            sent.clear()
            asked = replace(batch, num_top=num_top)
            backend.collect(backend.extend(asked))
            shape = json.loads((directory / "config.json").read_text())
            counted_by_model: Counter[tuple[str, int]] = Counter()
            for one in exchanges(asked, shape, item=4):
                counted_by_model[one.kind, one.bytes] += one.count
            assert counted_by_model == sent
    finally:
        backend.close()


def test_times_are_read_between_published_points():
    for size in (1, 1000, 50_000):
        assert between(TABLE, size) == pytest.approx(10)
    assert between(TABLE, 1_000_000) == pytest.approx(100)
    assert between(TABLE, 20_000_000) == pytest.approx(2000)
    gathered = Exchange("some", "all-gather", 500_000)  # of each rank; tables count all ranks'
    assert LINK.us(gathered, 2) == pytest.approx(100)
    assert LINK.us(replace(gathered, kind="all-reduce"), 2) == pytest.approx(50)
    with pytest.raises(ValueError, match=r"no all-gather of 3 ranks; known: \[2\]"):
        LINK.us(gathered, 3)


def test_the_error_of_a_table_is_what_others_measured():
    assert CHECKED.errors(large=False) == pytest.approx([0.2])
    assert CHECKED.errors(large=True) == pytest.approx([0.25])
    assert LINK.errors(large=True) == []


def test_every_published_exchange_has_a_source_and_every_card_a_table():
    links, cards = read_links(), read_cards()
    for link in links.values():
        assert all(source.startswith("https://") for source in link.sources)
        for points in link.tables.values():
            assert points == sorted(points)
            assert min(us for _, us in points) > 0
    for card in cards.values():
        if card.predicted:
            assert set(links[card.link].tables) == {
                (kind, ranks) for kind in ("all-reduce", "all-gather") for ranks in (2, 4, 8)
            }
    assert len(links[predict_ranks.CHECKED].errors(large=True)) >= 20
    assert links[predict_ranks.CHECKED].errors(large=False)


def test_all_parts_of_a_time_add_up():
    shape = SHAPES["small"]
    alone = on_ranks(PREDICTOR, LINK, CHECKED, GOAL, shape, 1).us
    found = on_ranks(PREDICTOR, LINK, CHECKED, GOAL, shape, 2)
    (batch,) = planned(GOAL.workload, shape)
    sums = exchanges(batch, shape)
    assert found.sent == sum(one.count * one.bytes for one in sums)
    assert found.exchange_us == pytest.approx(
        sum(one.count * (LINK.us(one, 2) + SWITCH_US) for one in sums)
    )
    calls = sum(one.count for one in sums)
    assert found.host_us == calls * HOST_CALL_US + shape["num_hidden_layers"] * HOST_LAYER_US
    assert found.handed_us == HANDED_US + len(words_of(batch)) / HANDED_BYTES_PER_US
    assert handing(batch, 4) - handing(batch, 2) == pytest.approx(
        2 * len(words_of(batch)) / HANDED_BYTES_PER_US
    )
    # The small model's device is quicker than its host, which is then what a pass takes.
    device = found.forward.us + found.exchange_us
    assert found.us == pytest.approx(max(device, found.host_us) + found.handed_us)
    assert alone / 2 + sum(found.lost(alone).values()) == pytest.approx(found.us)
    idle = replace(found, host_us=0.0)
    assert idle.us == pytest.approx(device + found.handed_us), "nothing overlaps with an exchange"
    assert idle.low < idle.us < idle.high
    large, small = ([one for one in sums if (one.bytes >= LARGE) == side] for side in (True, False))
    assert not large
    assert found.exchanges[0].low == pytest.approx(found.exchanges[0].us / 1.2)
    assert len(small) == len(found.exchanges)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parts_of_all_ranks_are_the_products_of_the_model(ranks):
    goal = Goal("some", Workload(1984, 500, 20))

    def flop(count):
        """Operations of a rank's products, from the shapes that its predictor sees."""
        work = []
        spied = _Spy(MODEL, ERRORS, CARD, CODE, TileShape(8, 64, 32), work)
        spied.forward(goal, QWEN3_32B, count)
        return sum(one.flop for one in work if isinstance(one, Product))

    assert flop(ranks) * ranks == pytest.approx(flop(1))
    part = part_of(QWEN3_32B, ranks)
    assert part["num_attention_heads"] == 64 // ranks
    assert part["hidden_size"] == QWEN3_32B["hidden_size"]


class _Spy(Predictor):
    """A predictor that keeps the work that it is asked for."""

    __slots__ = ("work",)

    def __init__(self, model, errors, card, code, tile, work):
        super().__init__(model, errors, card, code, tile)
        object.__setattr__(self, "work", work)

    def kernel(self, work, shape):
        self.work.append(work)
        return super().kernel(work, shape)


def test_the_host_takes_the_time_that_was_measured():
    rows = json.loads(MEASURED.read_text())["rows"]
    (row,) = [row for row in rows if (row["scorer"], row.get("workload")) == ("graphs off", "300")]
    layers = SHAPES["qwen3-0.6b"]["num_hidden_layers"]
    assert row["wall ms"] * 1e3 == pytest.approx(HOST_LAYER_US * layers, rel=0.001)
    assert row["device ms"] < row["wall ms"] / 4, "the device waited"


def test_gpuscores_own_plan_says_what_fits():
    memory = read_cards()["l4"].memory_mib
    fits = [why_not(QWEN3_32B, ranks, memory) for ranks in (1, 2, 4)]
    assert fits[0].startswith("the weights that config.json asks for take 62,488.8 MiB")
    assert fits[1:] == [fits[1], None]
    assert fits[1].startswith("the weights that config.json asks for take 31,245.0 MiB")


def test_the_command_marks_everything_as_predicted(tmp_path, monkeypatch, capsys):
    speeds = dict.fromkeys(("h100", "l4", "rtx-pro-6000"), 0.75)
    model = Model(speeds, 2000, 0.5, {"wgmma": OVERLAP, "mma.sync": OVERLAP})
    errors = {
        group: replace(ERRORS["product"], group=group) for group in [*ERRORS, "attention mma.sync"]
    }
    monkeypatch.setattr(predict, "judge", lambda measurements, cards: (model, errors))
    monkeypatch.setattr(predict, "facts_for", lambda card, config, group: None)
    monkeypatch.setattr(Code, "of", staticmethod(lambda facts: CODE))
    monkeypatch.setattr(predict_ranks, "CHOSEN", [GOALS[3]])
    out = tmp_path / "ranks.jsonl"
    monkeypatch.setattr(sys, "argv", ["predict.py", "--tensor-parallel", "8", f"--out={out}"])
    predict.main()
    printed, kept = capsys.readouterr().out, json.loads(out.read_text())
    titles = [line for line in printed.splitlines() if line and line[0] not in "|/"]
    assert all(title.startswith("PREDICTED, not measured") for title in titles)
    found = {(one["card"], one["ranks"]): one for one in kept["predictions"]}
    assert set(found) == {
        (key, n) for key in ("h100", "h200", "l4", "rtx-pro-6000") for n in (1, 8)
    }
    alone, shared = found["h200", 1], found["h200", 8]
    (row,) = [
        row
        for row in kept["tables"][titles[3].split(": ", 1)[1]]
        if (row["card"], row["N"]) == ("h200", 8)
    ]
    assert row["speed-up"] == f"{alone['all ms'] / shared['all ms']:.2f}"
    assert row["as replicas"] == f"{8 * 10 / alone['all ms'] * 1e3:,.0f}"
    assert row["in exchange"] == f"{shared['exchange ms'] / shared['all ms']:.0%}"
    # 1,920 rows of 5,120 numbers after the embedding and twice in each layer but the last
    assert shared["sent MB"] == pytest.approx(1920 * 5120 * 2 * 127 / 1e6, rel=0.01)


@pytest.mark.slow
def test_the_documented_predictions_are_those_that_the_command_prints(
    tmp_path, monkeypatch, capsys
):
    arguments = ["predict.py", "--tensor-parallel", "2", "4", "8", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", arguments)
    predict.main()
    printed = capsys.readouterr().out
    readme = (RESULTS.parent / "README.md").read_text()
    section = readme.split("### Cards that share a model\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert [row for row in rows if row not in printed] == []
    page = (RESULTS.parents[1] / "docs" / "how-to" / "scale-out.md").read_text()
    found = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 14 and cells[0] in read_cards():
            found[cells[0], cells[1], int(cells[2])] = cells
    times = [round(float(found["h200", "a", n][4])) for n in (1, 2, 4, 8)]
    one, two, four, eight = times
    assert f"takes one H200 {one:,} ms" in page
    assert f"two {two}, four\n{four} and eight {eight}" in page
    assert f"{float(found['rtx-pro-6000', 'a', 8][7]):.1f} times as fast as one" in page
    assert f"sums take {found['rtx-pro-6000', 'a', 8][8].removesuffix('%')} % of the time" in page
    assert f"take {float(found['l4', 'a', 4][4]) / 1e3:.0f} s" in page
    assert {f"{float(found['h200', '300', n][4]):.0f}" for n in (4, 8)} == {"21"}
