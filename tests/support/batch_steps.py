"""Runs `gpuscore` with parts of 50 rows, whose results are kept, and told of, one request after the
other."""

import sys

from gpuscore import __main__ as command
from gpuscore.commands.bulk import feeding, inputs, job

inputs.BLOCK_ROWS = 50
job.KEPT_EVERY = job.TOLD_EVERY = 0.0
feeding.BATCHES = 1

if __name__ == "__main__":
    sys.exit(command.main())
