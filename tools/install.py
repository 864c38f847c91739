"""Runs pip, and says what it does, for how long, and in one sentence why not.

    python tools/install.py 'torch, some 200 MB: a minute or two' install --no-compile torch

What pip itself prints is shown only if it fails for another reason than the network.
"""

import os
import re
import subprocess
import sys
import time

ELSEWHERE = "--or-extra-index-url"  # tried only if the package is not where pip looks by itself
SIGN_OF_LIFE = 10  # seconds
RETRIES = "2"  # of each file; pip's usual five are said one by one, for every package and index
UNREACHABLE = re.compile(
    r"connection broken by|NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError"
    r"|Max retries exceeded"
)
REASON = re.compile(
    r"\[Errno -?\d+\] ([A-Za-z ]+)|(Cannot connect to proxy|timed out)|(Network is unreachable)"
)


def main() -> int:
    what, *arguments = sys.argv[1:]
    index = None
    if arguments[0] == ELSEWHERE:
        index, arguments = arguments[1], arguments[2:]
    print(what, flush=True)
    start = time.monotonic()
    code, said = run_pip(arguments, start)
    if code and index and not UNREACHABLE.search(said):
        code, said = run_pip([*arguments, "--extra-index-url", index], start)
    if not code:
        print(f"  done, {time.monotonic() - start:.0f} s", flush=True)
    elif UNREACHABLE.search(said):
        found = REASON.search(said)
        reason = next(filter(None, found.groups())).strip() if found else "no connection"
        print(
            f"pip cannot reach its package index ({reason}): connect this machine, or name a "
            "mirror by PIP_INDEX_URL or a proxy by HTTPS_PROXY",
            file=sys.stderr,
        )
    else:
        print(said, file=sys.stderr)
    return code


def run_pip(arguments: list[str], start: float) -> tuple[int, str]:
    """Return pip's exit code and what it printed; show meanwhile that it is alive."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    process = subprocess.Popen(
        [sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]],
        env={"PIP_RETRIES": RETRIES} | os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    while True:
        try:
            said, _ = process.communicate(timeout=SIGN_OF_LIFE)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            print(f"  {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
