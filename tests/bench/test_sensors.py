"""Promise: the clock, power and temperature of a card are read while it works."""

import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import sensors


def test_what_the_library_of_the_card_says(monkeypatch):
    card = Path(__file__).parents[1] / "support" / "card"  # in place of NVIDIA's
    monkeypatch.syspath_prepend(card)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    sampler = sensors.Sampler()
    time.sleep(5 * sensors.PERIOD)
    found = [reading["median"] for reading in sampler.stop().values()]
    assert found == pytest.approx([1500, 690, 58], rel=0.02)
