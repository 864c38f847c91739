"""Scheduling, packing and the step loop, in pure Python and NumPy: no device code, no HTTP.

In the order of reading: `engine` has the queue and the thread, `runner` one step, `scheduler` what
a step computes, `jobs` what is known of a request and the batch that is made of it, `pages` and
`states` the KV cache, `plan` which items are computed, `ticket` the answer.
"""
