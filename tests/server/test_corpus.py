"""Promise: hostile requests get the right answers.

These are the quick ones of tests/hostile/http; tests/hostile/test_http.py sends all.
"""

import pytest

from support.changed_requests import mutations, told
from support.hostile_requests import entries, faults, names, sent

pytestmark = pytest.mark.usefixtures("unharmed")


@pytest.mark.parametrize("name", names())
def test_quick_entries(server, client, name):
    quick = [entry for entry in entries(name) if not entry.slow and not entry.fails]
    faults_of = {entry.name: list(faults(entry, sent(entry, server.address))) for entry in quick}
    assert {name: wrong for name, wrong in faults_of.items() if wrong} == {}


def test_noise(server, client):
    for data in mutations(seed=7, count=200):
        outcome = told(server.address, data)
        assert all(status < 500 or status in (501, 505) for status in outcome.statuses), data
        assert outcome.end in ("closed", "reset"), data
