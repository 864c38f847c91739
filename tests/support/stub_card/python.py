"""A Python interpreter whose processes find a CUDA card: a shell script that runs `main`."""

import os
import runpy
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

LOST_IN = "STUB_CARD_LOST_IN"  # variable: name of a script during which the card is lost
TESTS = Path(__file__).parents[2]
SCRIPT = """#!/bin/sh
STUB_CARD={name!r} STUB_CARD_PYTHON="$0" PYTHONPATH={paths}:$PYTHONPATH \\
  exec {python} -c 'from support.stub_card.python import main; main()' "$@"
"""


def interpreter(folder: Path, name: str) -> Path:
    """Write the script into `folder` and return its path.

    Args:
        folder: of the script.
        name: what torch calls the card.
    """
    path = folder / "python-with-a-card"
    path.write_text(SCRIPT.format(name=name, paths=TESTS, python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def main() -> None:
    """Do what python would with the arguments: -c, -m or a script, and -P or -IS.

    With -IS, for scripts that need the standard library only, there is no card.
    """
    sys.executable = os.environ["STUB_CARD_PYTHON"]
    words = sys.argv[1:]
    flag = words.pop(0) if words[0] in ("-P", "-IS") else None
    if flag != "-IS":
        from support.stub_card.card import put_in

        player = put_in(os.environ["STUB_CARD"])
        if any(Path(word).name == os.environ.get(LOST_IN) for word in words):
            player.lost_after = 100
    run(words)


def run(words: Sequence[str]) -> None:
    kind, *rest = words
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
