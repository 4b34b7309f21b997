"""Installed ops: functions of other packages that rewrite rows at a site, on CPUs.

Each op has a code, a number that the entries of the steering table hold and by which a site finds
the function. If an op fails, its rows become NaN, and fail only their own request, as all
non-finite rows do. See `docs/extending.md`.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch

logger = logging.getLogger(__name__)

#: (rows float32 `[n, hidden_size]`, read-only; vector float32 `[hidden_size]`; two numbers) → new
#: rows of the same shape and dtype.
InstalledEdit = Callable[[np.ndarray, np.ndarray, tuple[float, float]], np.ndarray]

#: Code → op, in this process. Filled before the first forward pass.
OPS: dict[int, InstalledEdit] = {}


def edited(
    code: int,
    rows: torch.Tensor,
    vector: torch.Tensor,
    strength: float,
    numbers: tuple[float, float],
) -> torch.Tensor:
    """Return `s + strength · (op(s) − s)` for each row s of float32 `[n, hidden_size]`. With
    strength 1, that is the op's result bit for bit. Rows on which the op fails become NaN.

    Rows with the same edit are passed to the op in one call. If that fails, each row is tried
    alone, so that only rows that cannot be edited fail.
    """
    new = _called(code, rows, vector, numbers)
    if new is None and len(rows) > 1:
        alone = [edited(code, row, vector, strength, numbers) for row in rows.split(1)]
        return torch.cat(alone)
    if new is None:
        return torch.full_like(rows, float("nan"))
    return new if strength == 1.0 else rows + strength * (new - rows)


def _called(
    code: int, rows: torch.Tensor, vector: torch.Tensor, numbers: tuple[float, float]
) -> torch.Tensor | None:
    """Return the op's result; None if it fails."""
    try:
        given = rows.numpy()
        direction = vector.numpy()
        given.flags.writeable = direction.flags.writeable = False
        new = np.array(OPS[code](given, direction, numbers))
        if new.shape != given.shape or new.dtype != np.float32:
            raise TypeError(
                f"it returned {new.dtype} of shape {new.shape}, for float32 rows of shape "
                f"{given.shape}"
            )
    except (Exception, SystemExit):
        logger.exception(
            "installed op %d failed for %d rows: rows that also fail alone become NaN",
            code,
            len(rows),
        )
        return None
    return torch.from_numpy(new)
