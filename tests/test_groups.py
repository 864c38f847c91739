"""Promise: under `make test` tests of a file run in one worker, which sets up what they share."""

import os

import pytest


@pytest.mark.parametrize("number", range(9))
def test_the_tests_of_a_file_share_a_worker(number, request, tmp_path_factory):
    if "groups" not in getattr(request.config, "workerinput", {}):
        pytest.skip("needs --dist loadgroup")
    place = tmp_path_factory.getbasetemp().parent / "workers of test_groups"  # of all workers
    with place.open("a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        assert set(file.read().split()) == {str(os.getpid())}
