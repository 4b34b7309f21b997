"""Code inside vLLM's rank processes: it edits and records rows in the forward pass.

On one GPU, vLLM runs scheduler, model runner and all our threads in one process, under one
interpreter lock. The model's thread does the scheduler's work (`vllm/scheduler.py`), then `begin`,
`choose` and `plan` before the forward pass and `drain` after it (`plane/data_plane.py`); the thread
that reads vLLM's outputs calls `found`. Beside them run a thread that lays out steering and those
that compute readings; files and receipts are written by a process of the rank that has no torch and
shares its memory of rows. On a CPU, and with more than one rank, each rank is a process of its own.

A helper that makes many short Python calls costs the model's thread several times its own time.
Therefore what runs in every step is arrays, not a loop over requests, and what may wait waits for
many steps.
`tests/unit/ordering/test_step_calls.py` and `benchmarks/host_bound.py` show a change to any of
this, with the longest step beside the mean.
"""
