"""Installed ops: loads them, tries each at the start, and gives them to the sites
(`kernels.installed`). On CPUs only.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from ....kernels.installed import OPS, Edit
from ....schemas.extensions import MAX_OP_OPTIONS, Extension, OpTerms, Option
from ....schemas.requests.specs import StoredSteering
from ..base.extensions import ExtensionError, Offer, code_of, declared, digest

logger = logging.getLogger(__name__)

#: An op's code is a float32 in the pool's scalars: integers are exact below.
CODES = 1 << 24
#: How far the result of a row may depend on the rows next to it, relative to the row's length:
#: products in another order round otherwise.
ALONE = 1e-4
ON_CPUS = "ops run on CPUs: the kernels of accelerators do not call Python"
_ROWS, _SEED = 6, 23


class OpCode(Protocol):
    """An installed op. `OpTerms` has the meaning of what it declares; all of it may be left out."""

    vector: bool
    options: Mapping[str, Option]

    def edit(self, rows: np.ndarray, vector: np.ndarray | None, **options: float) -> np.ndarray:
        """New rows for float32 `rows` `[n, hidden_size]`, each from itself alone.

        What it raises fails the requests of these rows.
        """


def load_ops(offers: Iterable[Offer], hidden_size: int, *, cpu: bool) -> list[Extension]:
    """The ops that trusted packages offer, each tried with random rows; from now on sites know
    them. Raises ExtensionError.

    `cpu`: the model runs on a CPU; elsewhere ops are listed, and refused.
    """
    extensions: dict[int, Extension] = {}
    for offer in offers:
        if offer.kind != "op":
            continue
        try:
            facts, edit = _loaded(offer, cpu=cpu)
            if twin := extensions.get(facts.code):
                raise ValueError(f"its code is that of the op {twin.name}: rename it")
            extensions[facts.code] = facts
            if not cpu:
                continue
            _check(edit, facts, hidden_size)
        except ExtensionError:
            raise
        except Exception as error:
            raise ExtensionError(
                f"{offer}: {error if isinstance(error, ValueError) else repr(error)}"
            ) from error
        OPS[facts.code] = edit
        logger.info("%s is loaded, code %s", offer, facts.digest[:12])
    return list(extensions.values())


def check_here(entries: Iterable[StoredSteering]) -> None:
    """Raises LookupError for an installed op that this rank does not have, or has in another
    version.
    """
    for entry in entries:
        if entry.family == "installed" and int(entry.numbers[-1]) not in OPS:
            raise LookupError(
                "an installed op of this request is not on this rank, or in another version: "
                "submit it again"
            )


def _loaded(offer: Offer, *, cpu: bool) -> tuple[Extension, Edit]:
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
    facts = Extension(
        kind="op",
        name=offer.name,
        package=offer.package,
        version=offer.version,
        digest=content,
        op=terms,
        code=code,
        refused="" if cpu else ON_CPUS,
        checked=checked if cpu else [],
    )
    return facts, edit


def _check(edit: Edit, facts: Extension, hidden_size: int) -> None:
    """Raises ValueError for what does not hold of random rows, or what the op raises."""
    assert facts.op is not None
    generator = np.random.default_rng(_SEED)
    rows = generator.standard_normal((_ROWS, hidden_size), dtype=np.float32)
    vector = generator.standard_normal(hidden_size, dtype=np.float32)
    defaults = [float(option.default) for option in facts.op.options.values()]
    numbers = (*defaults, 0.0, 0.0)[0], (*defaults, 0.0, 0.0)[1]

    def call(given: np.ndarray) -> np.ndarray:
        held, along = given.copy(), vector.copy()
        held.flags.writeable = along.flags.writeable = False
        new = edit(held, along, numbers)
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
    off = np.abs(alone - new).max(axis=1)
    if (off > ALONE * np.maximum(np.abs(new).max(axis=1), 1e-6)).any():
        raise ValueError("the result of a row depends on the rows beside it")
