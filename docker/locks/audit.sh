#!/bin/sh
# Known vulnerabilities of what the images install, with the tools of .venv-tools (make
# .venv-tools/.installed). Needs PyPI's advisories; where they cannot be had, or a package is not found
# in them, that is an error too.
set -e
cd "$(dirname "$0")"
for lock in build cpu tpu cuda; do
  ../../.venv-tools/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
    --requirement $lock.txt
done
