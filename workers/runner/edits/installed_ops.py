"""Installed ops: loads them, checks each when the rank starts, and registers them for the sites in
`kernels.installed`. On CPUs only.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np

from ....kernels.installed import OPS, InstalledEdit
from ....schemas.extensions import MAX_OP_OPTIONS, Extension, OpTerms
from ....schemas.requests.specs import FAMILY_NAME, StoredSteering
from ..base.extensions import Offer, code_of, declared, digest, loading

logger = logging.getLogger(__name__)

#: Op codes are below this: a code is a float32 in the pool's scalars, which is exact for these. As
#: a number of the entry, it is in the cache's keys, the action ledger and each rank's admission.
CODES = 1 << 24
#: Largest difference between a row's results alone and in a batch, relative to its largest element:
#: matrix products may round differently.
ALONE = 1e-4
#: Graphs replay without Python, and an operator's kernel would have to prove its registers, bounds
#: and bits: that is a family of `FAMILIES`, not a plug-in.
ON_CPUS = "ops run on CPUs: the kernels of accelerators do not call Python"
_ROWS = 6
_SEED = 23


class OpCode(Protocol):
    """An installed op. `OpTerms` has its attributes, all of which are optional."""

    def edit(self, rows: np.ndarray, vector: np.ndarray | None, **options: float) -> np.ndarray:
        """Return new rows for float32 `rows` `[n, hidden_size]`; each depends on its own row only.

        An exception fails the requests of these rows.
        """


def load_ops(offers: Iterable[Offer], hidden_size: int, *, cpu: bool) -> list[Extension]:
    """Load the ops that trusted packages offer, check each with random rows, and register them for
    the sites. Raises ExtensionError.

    `cpu`: the model runs on a CPU; elsewhere ops are only listed, as refused.
    """
    extensions: dict[int, Extension] = {}
    for offer in offers:
        if offer.kind != "op":
            continue
        with loading(offer):
            facts, edit = _loaded(offer, cpu=cpu)
            if twin := extensions.get(facts.code):
                raise ValueError(f"it has the same code number as the op {twin.name}: rename it")
            extensions[facts.code] = facts
            if not cpu:
                continue
            _check(edit, facts, hidden_size)
        OPS[facts.code] = edit
        logger.info("%s is loaded, code %s", offer, facts.digest[:12])
    return list(extensions.values())


def check_here(entries: Collection[StoredSteering]) -> None:
    """Raises LookupError if this rank lacks an installed op, or has another version of it."""
    if "installed" not in map(FAMILY_NAME, entries):
        return
    for entry in entries:
        if entry.family == "installed" and int(entry.numbers[-1]) not in OPS:
            raise LookupError(
                "this rank lacks an installed op of this request, or has another version of it: "
                "submit the request again"
            )


def _loaded(offer: Offer, *, cpu: bool) -> tuple[Extension, InstalledEdit]:
    content = digest(offer)
    op: OpCode = code_of(offer)
    terms = declared(op, OpTerms)
    names = list(terms.options)
    if len(names) > MAX_OP_OPTIONS or any(
        type(option.default) is not float for option in terms.options.values()
    ):
        raise ValueError(
            f"an op has at most {MAX_OP_OPTIONS} options, and their defaults are floats"
        )

    def edit(rows: np.ndarray, vector: np.ndarray, numbers: tuple[float, float]) -> np.ndarray:
        return op.edit(
            rows, vector if terms.vector else None, **dict(zip(names, numbers, strict=False))
        )

    code = (
        int(hashlib.sha256(f"{offer.name} {content}".encode()).hexdigest()[:6], 16) % (CODES - 1)
        + 1
    )
    checked = [
        "float32 rows of the same shape",
        "same rows, same result",
        "each row from itself alone",
        "finite",
        "input unchanged",
    ]
    facts = offer.facts(
        content,
        op=terms,
        code=code,
        refused="" if cpu else ON_CPUS,
        checked=checked if cpu else [],
    )
    return facts, edit


def _check(edit: InstalledEdit, facts: Extension, hidden_size: int) -> None:
    """Raises ValueError if the op fails a check on random rows, or what the op raises."""
    assert facts.op is not None
    generator = np.random.default_rng(_SEED)
    rows = generator.standard_normal((_ROWS, hidden_size), dtype=np.float32)
    vector = generator.standard_normal(hidden_size, dtype=np.float32)
    defaults = [float(option.default) for option in facts.op.options.values()]
    padded = (*defaults, 0.0, 0.0)

    def call(given: np.ndarray) -> np.ndarray:
        held = given.copy()
        along = vector.copy()
        held.flags.writeable = along.flags.writeable = False
        new = edit(held, along, (padded[0], padded[1]))
        if not isinstance(new, np.ndarray) or new.dtype != np.float32 or new.shape != given.shape:
            shown = (
                f"{new.dtype} of shape {new.shape}"
                if isinstance(new, np.ndarray)
                else type(new).__name__
            )
            raise ValueError(f"returned {shown} for float32 rows of shape {given.shape}")
        if not (np.array_equal(held, given) and np.array_equal(along, vector)):
            raise ValueError("changes its input")
        return new.copy()

    new = call(rows)
    if not np.isfinite(new).all():
        raise ValueError("returned rows that are not finite")
    if call(rows).tobytes() != new.tobytes():
        raise ValueError("gives different results for the same rows")
    alone = np.concatenate([call(rows[place : place + 1]) for place in range(_ROWS)])
    difference = np.abs(alone - new).max(axis=1)
    if (difference > ALONE * np.maximum(np.abs(new).max(axis=1), 1e-6)).any():
        raise ValueError("the result of a row depends on the rows next to it")
