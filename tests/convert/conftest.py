import pytest

from gpuscore.commands.cli import main


@pytest.fixture
def convert(tmp_path):
    """A function that converts a source and returns the directory."""

    def run(source, *words):
        assert main(["convert", str(source), str(tmp_path / "out"), *words]) == 0
        return tmp_path / "out"

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """A function that returns the one line of a refusal, after which nothing is left."""

    def run(source, *words):
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        capsys.readouterr()
        assert main(["convert", str(source), str(place / "out"), *words]) == 2
        assert not list(place.iterdir())
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        return line.removeprefix("gpuscore: ")

    return run
