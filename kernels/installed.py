"""Installed ops: functions of other packages that rewrite rows at a site, on CPUs.

See `docs/extending.md`.

A site knows an op by its code, a number that its pool entry holds. What an op does wrong becomes
rows that are not finite, which fail their request as any such rows do, and no other.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch

logger = logging.getLogger(__name__)

#: (rows float32 `[n, hidden_size]`, read-only; vector float32 `[hidden_size]`; two numbers) → new
#: rows of the same shape and dtype.
Edit = Callable[[np.ndarray, np.ndarray, tuple[float, float]], np.ndarray]

#: Of this process: code → the op. Filled before the first forward pass.
OPS: dict[int, Edit] = {}


def edited(
    code: int,
    rows: torch.Tensor,
    vector: torch.Tensor,
    strength: float,
    numbers: tuple[float, float],
) -> torch.Tensor:
    """`s + strength · (op(s) − s)` for each row s of float32 `[n, hidden_size]`; with strength 1
    the op's own bits. NaN where it fails.

    Requests with the same edit are edited in one call. Where that fails, each row is tried alone,
    so that only those that cannot be edited fail.
    """
    cat = _tried(code, rows, vector, numbers)
    if cat is None:
        alone = (
            (_tried(code, row, vector, numbers) for row in rows.split(1))
            if len(rows) > 1
            else [None]
        )
        cat = torch.cat(
            [
                torch.full_like(row, float("nan")) if new is None else new
                for row, new in zip(rows.split(1), alone, strict=True)
            ]
        )
    return cat if strength == 1.0 else rows + strength * (cat - rows)


def _tried(
    code: int, rows: torch.Tensor, vector: torch.Tensor, numbers: tuple[float, float]
) -> torch.Tensor | None:
    """Return what the op gives; None where it fails."""
    try:
        given, along = rows.numpy(), vector.numpy()
        given.flags.writeable = along.flags.writeable = False
        new = np.array(OPS[code](given, along, numbers))
        if new.shape != given.shape or new.dtype != np.float32:
            raise TypeError(
                f"it returned {new.dtype} of shape {new.shape}, for float32 rows of shape "
                f"{given.shape}"
            )
    except (Exception, SystemExit):
        logger.exception(
            "installed op %d failed for %d rows: those that fail alone become NaN", code, len(rows)
        )
        return None
    return torch.from_numpy(new)
