"""Relative sizes of edits, computed from rows that were captured before and after them."""

import math
from collections.abc import Sequence

import numpy as np
from host import Host, capture_of

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.requests.specs import StoredCapture


def both_sides(layers: list[int]) -> list[StoredCapture]:
    """All rows of these layers, before the edits and after them."""
    return [capture_of(layers, "all", side, at=side) for side in ("before", "after")]


def sizes_of(host: Host, job: Job, layer: int, request: int = 0) -> np.ndarray:
    """For each position ‖edit‖ / ‖row‖ at `layer`, from the captures of `both_sides`."""
    before, after = (
        host.capture(job, number).array(layer, request=request).astype(np.float64)
        for number in (0, 1)
    )
    return np.linalg.norm(after - before, axis=1) / np.linalg.norm(before, axis=1)


def check_sizes(
    host: Host, job: Job, layers: list[int], edited: Sequence[int] | None = None, request: int = 0
) -> list[float]:
    """The receipt's sizes are those of the captured rows; returns the largest of each layer.

    `edited`: the edited positions; None: all.
    """
    receipt = next(item for item in host.receipts(job) if item.request == request and item.tp == 0)
    assert [(size.hook, size.layer) for size in receipt.sizes] == [
        ("post_block", layer) for layer in layers
    ]
    for size in receipt.sizes:
        wanted = sizes_of(host, job, size.layer, request)
        wanted = wanted if edited is None else wanted[list(edited)]
        assert size.rows == len(wanted), (job.id, size)
        assert math.isclose(size.largest, wanted.max(), rel_tol=1e-4), (size, wanted.max())
        assert math.isclose(size.median, np.median(wanted), rel_tol=1e-4), (size, np.median(wanted))
    return [size.largest for size in receipt.sizes]
