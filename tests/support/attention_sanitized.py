"""A program that computes attention of odd shapes with a library compiled with sanitizers.

Usage: attention_sanitized.py MACHINE FLAG...; the sanitizers' runtimes have to be preloaded.
"""

import sys
from dataclasses import replace

import torch

from backends.test_attention import ALLOWED, HEADS, SHORT, worst
from support.attention_forms import form
from support.attention_inputs import heads_alone

machine, *flags = sys.argv[1:]
torch.set_num_threads(1)
for seed, sizes in enumerate(HEADS):
    for dtype, allowed in ALLOWED.items():
        window = (None, 1, 17)[seed % 3]
        config = replace(heads_alone(*sizes), windows=(window, None))
        error = worst(form(machine, dtype, *flags), SHORT[seed % len(SHORT)], config, dtype)
        print(sizes, dtype, "right" if error < allowed else error, flush=True)
