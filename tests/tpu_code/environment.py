"""Variables that libtpu reads where there is no TPU. Import this before JAX.

Without them it asks Google's metadata server about the machine, complains that it is none, and lets
only one process load it.
"""

import os

VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
os.environ.update(VARIABLES)
