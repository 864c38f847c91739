"""Runs a batch job of short rows on the fake backend and prints its peak of resident memory.

python -m support.batch_memory FOLDER ROWS
"""

import re
import sys
from pathlib import Path

from gpuscore.commands.bulk import inputs
from support.batch_jobs import check, read_jsonl, run

QUERIES = 5000
inputs.BLOCK_ROWS = 500


def status(name: str) -> float:
    """Return a size from /proc/self/status, in MiB."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def write_rows(path: Path, rows: int) -> None:
    """Write rows whose queries come in no order."""
    with path.open("w") as file:
        for number in range(rows):
            query = number * 7919 % QUERIES
            file.write(f'{{"n":{number},"query":"query {query}: ","item":"a lamp {number}"}}\n')


def main(folder: Path, rows: int) -> None:
    source, output = folder / f"{rows}.jsonl", folder / f"{rows}.out.jsonl"
    write_rows(source, rows)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    numbers = run(source, output)
    peak = status("VmHWM") - before
    assert numbers == (rows, 0)
    with output.open("rb") as file:
        numbers = [int(line[5 : line.index(b",")]) for line in file]
    assert numbers == list(range(rows))
    head = folder / "head.jsonl"
    with output.open("rb") as file:
        head.write_bytes(b"".join(next(file) for _ in range(100)))
    scored = read_jsonl(head)
    check(scored, [row["scores"] for row in scored])
    print(f"peak: {peak:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
