"""Runs `gpuscore` with limits of descriptors: python -m support.limited SOFT HARD WORDS."""

import resource
import sys

from gpuscore import __main__ as command

if __name__ == "__main__":
    soft, hard = map(int, sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del sys.argv[1:3]
    sys.exit(command.main())
