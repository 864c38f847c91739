"""Runs `gpuscore` with parts of 50 rows, whose results are kept, and told of, one request after the
other; no file gets more bytes than FILE_BYTES says, as on a full disk."""

import os
import resource
import sys

from gpuscore import __main__ as command
from gpuscore.commands.bulk import command as job
from gpuscore.commands.bulk import inputs, scoring

inputs.BLOCK_ROWS = 50
scoring.SAVE_EVERY = job.REPORT_EVERY = 0.0
scoring.BATCHES = 1

if __name__ == "__main__":
    if most := os.environ.get("FILE_BYTES"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
    sys.exit(command.main())
