"""Changes the global steering of a model, once every rank of every live worker could apply it."""

import asyncio
import logging
import time
from collections.abc import Sequence

import anyio

from ...broker.ledger.named.steering import LedgerSteering
from ...schemas.base.errors import MidstreamError
from ...schemas.base.tensors import PackedBlobs
from ...schemas.requests.steering import GlobalSteering, SteeringTemplate, content_digest

log = logging.getLogger("midstream.api")

#: Seconds between reads of the workers' answers.
LOOK_S = 0.05


async def change(
    steering: LedgerSteering,
    seconds: float,
    model: str,
    entries: Sequence[SteeringTemplate],
    blobs: PackedBlobs,
) -> GlobalSteering:
    """Run every job of `model` that is claimed from now on under `entries` (empty: no global
    steering); repeating the same change has no effect.

    The workers have `seconds` to check `entries`. Raises MidstreamError, and then nothing has
    changed: `conflict` if a rank rejects the change, `unavailable` if a live worker does not
    answer.
    """
    current = await steering.current(model)
    if content_digest(list(entries)) == current.digest:
        return current
    # A change that a rank cannot apply would fail every job. Checks do not depend on what is in
    # force, so concurrent changes need no turns: the last one counts.
    check = await steering.open_check(model, entries, blobs)
    try:
        if entries:  # what takes steering away needs nothing of the ranks
            await _pass(steering, seconds, model, check)
        return await steering.set_global(model, check, entries)
    finally:
        with anyio.CancelScope(shield=True):
            await _close(steering, model, check)


async def _pass(steering: LedgerSteering, seconds: float, model: str, check: str) -> None:
    """Return once every live worker has answered that all its ranks could apply the check."""
    deadline = time.monotonic() + seconds
    while True:
        answers = await steering.answers(model, check)
        for worker, refusal in answers.items():
            if refusal:
                raise MidstreamError(
                    "conflict",
                    f"worker {worker} rejected it; nothing was changed: {refusal}",
                )
        silent = [worker for worker, refusal in answers.items() if refusal is None]
        if not silent:
            return
        if time.monotonic() > deadline:
            raise MidstreamError(
                "unavailable",
                f"not all workers checked the change within {seconds:g} s (missing: "
                f"{', '.join(silent)}); nothing was changed",
            )
        await asyncio.sleep(LOOK_S)


async def _close(steering: LedgerSteering, model: str, check: str) -> None:
    try:
        await steering.close_check(model, check)
    except MidstreamError as error:  # it expires automatically
        log.warning("cannot withdraw check %s of global steering of %s: %s", check, model, error)
