"""Do global steering, a request's patches and its own steering meet at one row in the documented
order? The order of every pair of ops is tested with the table of rows.
"""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error
from patching_kit import for_everyone, patch
from reference import Edit, Reference
from rows_kit import check_rows
from tiny import HIDDEN

from midstream.schemas.requests.specs import StoredSteering
from midstream.schemas.requests.steering import GlobalSteering

#: docs/steering.md, "In which order"; of one kind: global, patch, the request's own steering.
ORDER = ("replace", "lowrank", "add", "add_matched", "ablate", "clamp")
PROMPT, MASK = 9, np.arange(HIDDEN) % 3 == 0


def ops(seed: int) -> dict[str, Edit]:
    """Op → an edit of layer 1; with another seed of other vectors, so that the order shows."""
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(6, HIDDEN)).astype(np.float32)
    rotation = np.linalg.qr(rng.normal(size=(HIDDEN, 3)))[0].T.astype(np.float32)
    weight, bias = (
        (rng.normal(size=(3, HIDDEN)) / 8).astype(np.float32),
        rng.normal(size=3).astype(np.float32),
    )
    return {
        "replace": Edit(1, v[0], op="replace", alpha=0.6, scale=2.0),
        "lowrank": Edit(
            1, op="lowrank", rotation=rotation, weight=weight, bias=bias, strength=0.75
        ),
        "add": Edit(1, v[1], op="add", scale=1.5),
        "add_matched": Edit(1, v[2], op="add", scale=0.4, norm_match=True),
        "ablate": Edit(1, v[3], op="ablate"),
        "clamp": Edit(1, v[4], op="clamp", low=2.0, high=3.0),
        "patch": Edit(1, v[5], op="replace"),
        "partial patch": Edit(1, v[5], op="replace", alpha=0.5),
        "masked patch": Edit(1, v[5], op="replace", mask=MASK),
    }


def stored(host: Host, op: str, edit: Edit) -> list[StoredSteering]:
    """As the API stores it."""
    if "patch" not in op:
        return host.steering(edit)
    assert edit.vector is not None
    mask = "" if edit.mask is None else host.vector(edit.mask)
    return [patch(host.vector(edit.vector), "post_block", [1], "all", edit.alpha, mask)]


def in_order(*edits: tuple[str, Edit]) -> list[Edit]:
    """`edits`: (op, edit), those of everyone first, then patches, then the request's steering."""
    return [
        edit
        for _, edit in sorted(
            edits, key=lambda item: ORDER.index("replace" if "patch" in item[0] else item[0])
        )
    ]


def check(
    host: Host,
    reference: Reference,
    wanted: dict[str, tuple[list[StoredSteering], list[Edit]]],
    everyone: GlobalSteering,
) -> None:
    """Name → (a request's entries, the reference's edits): every row after the edits is the
    reference's.
    """
    capture = capture_of([1, 3], "all", at="after")
    jobs = {
        name: host.job(prompt_of(PROMPT), max_tokens=2, capture=capture, steering=steering)
        for name, (steering, _) in wanted.items()
    }
    answer = host.run_any(*jobs.values(), everyone=everyone)
    assert not answer.errors, answer.errors
    for name, job in jobs.items():
        check_rows(host, reference, job, answer.outputs[job.id], wanted[name][1])


@pytest.mark.parametrize("op", ["replace", "clamp"])
def test_request_and_global_ops_apply_in_the_documented_order(
    v1: Host, reference: Reference, op: str
) -> None:
    theirs, mine = ops(1)[op], ops(2)
    wanted = {
        name: (stored(v1, name, edit), in_order((op, theirs), (name, edit)))
        for name, edit in mine.items()
    }
    check(v1, reference, wanted, for_everyone(1, *v1.steering(theirs)))


def test_patches_apply_between_global_and_request_steering(v1: Host, reference: Reference) -> None:
    theirs, patched, own = ops(1)["replace"], ops(2), ops(3)["replace"]
    wanted = {}
    for name in ("patch", "partial patch", "masked patch"):
        entries = [*stored(v1, name, patched[name]), *stored(v1, "replace", own)]
        wanted[name] = entries, [theirs, patched[name], own]
    check(v1, reference, wanted, for_everyone(1, *v1.steering(theirs)))
    other_way = reference.rows(prompt_of(PROMPT), [patched["patch"], theirs, own], "after")[
        "post_block", 1
    ]
    right = reference.rows(prompt_of(PROMPT), [theirs, patched["patch"], own], "after")[
        "post_block", 1
    ]
    assert relative_error(other_way, right) > 0.1, "the order matters here"
