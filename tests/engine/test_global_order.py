"""Do global steering, a request's patches and its own steering meet at one row in the documented
order, for every pair of ops?
"""

import msgspec
import numpy as np
import pytest
from engine_process import Command
from host import Host, capture_of, prompt_of, relative_error
from patching_kit import patch
from reference import Edit, Reference
from tiny import HIDDEN
from tolerances import FP32_ROWS

from midstream.schemas.requests.specs import StoredSteering
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate

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


def of_everyone(host: Host, edit: Edit) -> GlobalSteering:
    entries = [
        SteeringTemplate(
            layers=e.layers,
            hook=e.hook,
            positions="all",
            family=e.family,
            tensors=e.tensors,
            scale=e.scale,
            numbers=e.numbers,
            rank=e.rank,
        )
        for e in host.steering(edit)
    ]
    return GlobalSteering(version=1, entries=entries)


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
    answer = host.send(Command(jobs=list(jobs.values()), vectors=host._vectors, everyone=everyone))
    assert not answer.errors, answer.errors
    for name, job in jobs.items():
        tokens = (job.prompts[0].token_ids + answer.outputs[job.id][0].token_ids)[:-1]
        truth, reader = reference.rows(tokens, wanted[name][1], "after"), host.capture(job)
        for layer in (1, 3):
            assert relative_error(reader.array(layer), truth["post_block", layer]) <= FP32_ROWS, (
                name,
                layer,
            )


@pytest.mark.parametrize("op", ORDER)
def test_request_and_global_ops_apply_in_the_documented_order(
    v1: Host, reference: Reference, op: str
) -> None:
    theirs, mine = ops(1)[op], ops(2)
    wanted = {
        name: (stored(v1, name, edit), in_order((op, theirs), (name, edit)))
        for name, edit in mine.items()
    }
    check(v1, reference, wanted, of_everyone(v1, theirs))


def test_patches_apply_between_global_and_request_steering(v1: Host, reference: Reference) -> None:
    theirs, patched, own = ops(1)["replace"], ops(2), ops(3)["replace"]
    wanted = {}
    for name in ("patch", "partial patch", "masked patch"):
        entries = [*stored(v1, name, patched[name]), *stored(v1, "replace", own)]
        wanted[name] = entries, [theirs, patched[name], own]
    check(v1, reference, wanted, of_everyone(v1, theirs))
    other_way = reference.rows(prompt_of(PROMPT), [patched["patch"], theirs, own], "after")[
        "post_block", 1
    ]
    right = reference.rows(prompt_of(PROMPT), [theirs, patched["patch"], own], "after")[
        "post_block", 1
    ]
    assert relative_error(other_way, right) > 0.1, "the order matters here"


def test_a_patch_of_whole_rows_leaves_nothing_of_a_global_replace(v1: Host) -> None:
    """Bit for bit: what everyone's rows are replaced by does not reach a row that the request
    patches.
    """
    theirs, edit = ops(1)["replace"], ops(2)["patch"]
    assert edit.vector is not None
    job = v1.job(
        prompt_of(PROMPT),
        max_tokens=1,
        capture=capture_of([1], "all", at="after"),
        steering=stored(v1, "patch", edit),
    )
    answer = v1.send(
        Command(
            jobs=[job],
            vectors=v1._vectors,
            everyone=msgspec.structs.replace(of_everyone(v1, theirs), version=2),
        )
    )
    assert not answer.errors, answer.errors
    np.testing.assert_array_equal(v1.capture(job).array(1), np.tile(edit.vector, (PROMPT, 1)))
