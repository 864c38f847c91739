"""Programs of docs/how-to/clients.md, which run as a reader runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "clients.md"
HERE = "http://127.0.0.1:8000"


def printed_and_shown(library: str, url: str, key: str) -> tuple[str, str]:
    """Run a library's program against a server; return what it prints and what the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"\n## {library}\n")[1].split("\n## ")[0]
    program = section.split("```python\n")[1].split("```")[0]
    assert program.count(HERE) == 1
    done = subprocess.run(
        [sys.executable, "-c", program.replace(HERE, url)],
        env=os.environ | {"GPUSCORE_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, text.split("```text\n")[1].split("```")[0]


def installed(library: str, requirements: str) -> bool:
    """Return True if a file of requirements has all packages that a library's section installs."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {library}\n")[1]
    wanted = re.findall(r"^pip install (.*)$", section, re.MULTILINE)[0].split()
    file = Path(__file__).parent / "requirements" / f"{requirements}.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    return set(wanted) <= {line.partition("==")[0] for line in lines}
