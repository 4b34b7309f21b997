"""Checks captured rows: by the laws of the certificate, and beside other requests in the batch."""

from collections.abc import Iterator

import numpy as np

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import content_hash, from_numpy

from .finding import CheckFinding
from .promises import judge
from .rig import BATCH, HTTP_S, LENGTH, OWN_TOKENS, STRONG, Rig

#: Pairs of runs beside another request until all are composed alike; tokens of the other request.
LEAST_TRIES = 3
TRIES = 10
OTHERS_TOKENS = 64
#: The law of the certificate whose tolerance bounds the noise floor: in units of the dtype's
#: precision, and at least a thousandth, as docs/architectures.md says.
BATCH_LAW = "post_block: rows in a mixed batch = those alone"
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
LEAST_NOISE = 1e-3


def certificate(rig: Rig) -> Iterator[CheckFinding]:
    """Count the laws that fail in the certificate of the loaded model."""
    if (found := rig.certificate) is None:
        raise MidstreamError("internal", "the model was not certified (setting certify)")
    unproven = sorted({*found.absent, *found.unproven})
    missing = f"; not proven: {', '.join(unproven)}" if unproven else ""
    wrong = len(found.failed)
    if not found.proven:
        wrong += 1
    yield judge(
        "certificate",
        [wrong],
        f"{len(found.laws)} laws checked in {found.seconds:.0f} s; proven: "
        f"{', '.join(found.proven)}{missing}",
    )


def neighbour(rig: Rig) -> Iterator[CheckFinding]:
    """Compare a prompt's rows beside a steered request with those alone and beside the same request
    unsteered, bit for bit.

    A batch of another shape may change bits, too; therefore runs go on until each one beside the
    steered request equals one without it, or `TRIES` is reached.
    """
    (prompt,) = rig.prompts(1, LENGTH // 2)
    others = rig.prompts(1)
    strong = rig.steering(STRONG)
    rows, _ = rig.rows([prompt])
    without = {content_hash(from_numpy(rows))}
    beside = set[str]()
    shared = 0
    room = min(OTHERS_TOKENS, rig.card["max_model_len"] - LENGTH)
    last = {"layers": -1, "positions": "last_prompt"}
    for number in range(TRIES):
        for steering in ([], strong):
            other = rig.submit(others, room, capture=last, steering=steering)
            rig.await_start(other.id)
            rows, ended = rig.rows([prompt])
            rig.client.wait(other.id, HTTP_S)
            others_end = rig.step(other.id)
            if not others_end - room <= ended - OWN_TOKENS < ended <= others_end:
                continue  # not all of its steps were shared
            if steering:
                shared += 1
                beside.add(content_hash(from_numpy(rows)))
            else:
                without.add(content_hash(from_numpy(rows)))
        if number + 1 >= LEAST_TRIES and shared >= LEAST_TRIES and beside <= without:
            break
    if not shared:
        raise MidstreamError("internal", "the requests never shared a step")
    yield judge(
        "neighbour",
        [len(beside - without)],
        f"{shared} runs in one batch with a request steered in every layer; "
        f"{len(beside | without)} different results",
    )


def noise(rig: Rig) -> Iterator[CheckFinding]:
    """Compare a prompt's rows alone with those in a batch: what a change of the batch does to rows
    of the same request.
    """
    prompt, *others = rig.prompts(BATCH // 2)
    alone, _ = rig.rows([prompt])
    batched, _ = rig.rows([prompt, *others])
    errors = np.linalg.norm(batched - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
    laws = rig.certificate.laws if rig.certificate else []
    units = next((law.tolerance for law in laws if law.law == BATCH_LAW), 0.0)
    yield judge(
        "noise",
        [float(np.median(errors))],
        f"the median of {errors.size} rows; the largest {errors.max():.2g}; limit: the "
        "certificate's tolerance for batches",
        max(units * EPS.get(rig.card["dtype"], 0.0), LEAST_NOISE),
    )
