"""Captured rows of a job against those of the reference, and what changes them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from host import Host, relative_error
from reference import Edit, Reference
from tiny import HIDDEN
from tolerances import FP32_ROWS

from midstream.schemas.jobs.jobs import Job, Output


def direction(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)


def check_rows(
    host: Host,
    reference: Reference,
    job: Job,
    outputs: Iterable[Output],
    edits: Sequence[Edit | tuple[Any, ...]] = (),
    tolerance: float = FP32_ROWS,
) -> int:
    """Every row of the job's first capture is there once, and is the reference's under `edits`.

    Returns how many rows were compared.
    """
    reader = host.capture(job)
    compared = 0
    for output in outputs:
        prompt = job.prompts[output.index].token_ids
        capture = job.captures[output.index][0]
        tokens = prompt + output.token_ids[:-1]
        positions = reader.positions(output.index)
        assert positions == list(capture.select(0, len(tokens), len(prompt))), job.id
        assert reader.token_ids(output.index) == [tokens[position] for position in positions]
        rows = reference.rows(tokens, [Edit(*edit) for edit in edits], capture.at)
        for hook, layers in capture.sites.items():
            for layer in layers:
                got = reader.array(layer, hook, output.index)
                error = relative_error(got, rows[hook, layer][positions])
                assert error <= tolerance, (job.id, output.index, hook, layer, error)
                compared += len(got)
    return compared
