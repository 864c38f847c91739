"""Promise: whatever is asked for and whatever fails, the CUDA launcher's accesses to memory are in
an order that streams, events and threads enforce.

`make check-streams ARGS='--worlds 500'` runs more worlds than the suite.
"""

import pytest

from support.streams.runner import PLAIN, setup_of
from support.streams.worlds import FAULTS, GROUP, check_group

WORLDS = 100


def test_no_finding_in_a_few_worlds(model):
    report = check_group(model, (0,), 0)
    assert not report.findings, [str(finding) for _, finding in report.findings.values()]
    checked_much(report, 1)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(WORLDS // GROUP))
def test_no_finding(model, group):
    report = check_group(model, range(group * GROUP, (group + 1) * GROUP), group)
    assert not report.findings, [str(finding) for _, finding in report.findings.values()]
    if setup_of(group) is PLAIN:
        assert report.counts.waits["threads that waited for a stream"] > 100
    else:
        checked_much(report, GROUP)
    assert sum(report.batches[kind] for kind in FAULTS) >= GROUP / 2


def checked_much(report, worlds):
    """Assert that a report without findings is not one about nothing."""
    assert report.worlds >= worlds
    assert report.counts.operations > 300 * worlds
    assert {"the default stream", "stream 1", "stream 2"} <= report.streams
    assert report.changes > 50
    assert report.counts.ordered["stream before stream"] > 30 * worlds
    assert report.counts.ordered["stream before thread"] > 30 * worlds
    for kind in (
        "events recorded",
        "streams that waited",
        "threads that waited for an event",
        "handovers between threads",
    ):
        assert report.counts.waits[kind] > 3 * worlds, kind
