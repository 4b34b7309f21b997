"""What the kernel does at a site, in numpy."""

import numpy as np

from midstream.kernels.plan import (
    AFTER,
    BEFORE,
    CAPTURED_AFTER,
    CAPTURED_BEFORE,
    DEPTH,
    EDITED,
    EDITS,
    OVERFLOWED,
    SITE,
    Buffers,
)
from midstream.schemas.requests.interventions import PLACE


def visit(buffers: Buffers, number: int, rows: np.ndarray) -> None:
    """Do what the kernel does at one site, with the buffers as they are now. `rows`: float32
    `[tokens, width]`, changed in place.
    """
    of = {name: tensor.content.numpy() for name, tensor in vars(buffers).items()}
    plan = of["plan"][number]
    if not plan[SITE]:
        return
    counts = of["counts"][plan[SITE] - 1]

    def capture(port: type[BEFORE], column: int) -> None:
        if plan[port.COUNT]:
            slots = of["capture_slots"][plan[port.PATTERN], : len(rows)]
            tokens = np.flatnonzero(slots >= 0)
            of["ring"][plan[port.ROW] + slots[tokens]] = rows[tokens]
            counts[column] += len(tokens)

    capture(BEFORE, CAPTURED_BEFORE)
    edited = len(rows) if plan[EDITS] else 0
    for token in range(edited):
        named = of["token_rows"][token, : plan[DEPTH]]
        entries = of["site_rows"][number][:, named]  # [families, columns]
        before = rows[token].copy()
        counts[EDITED] += int((entries > 0).any(axis=0).sum())
        for entry in entries[PLACE["replace"]]:
            if entry > 0 and of["scalars"][entry, 0]:
                rows[token] = of["pool"][entry]
        for entry in entries[PLACE["add"]]:
            if entry > 0:
                rows[token] += of["pool"][entry]
        if (entries > 0).any():
            size = np.linalg.norm(rows[token] - before) / np.linalg.norm(before)
            of["sizes"][plan[SITE] - 1, token] = size if np.isfinite(size) else OVERFLOWED
    capture(AFTER, CAPTURED_AFTER)
