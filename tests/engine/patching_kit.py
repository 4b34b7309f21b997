"""What do the tests of patching share?

Patch entries as the API resolves them, and a batch of patched requests with their truth.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from host import Host, capture_of, prompt_of
from reference import Edit, Reference
from rows_kit import check_rows
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS, Hook, PositionSelector
from midstream.schemas.requests.source_runs import ZEROS, RunRow, row_name
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate

ALL = list(range(LAYERS))
EVERYTHING: dict[Hook, list[int]] = {hook: ALL for hook in HOOKS}


class Cell(NamedTuple):
    """The row at (hook, layer, position), and which position of the source it comes from (None: the
    same).
    """

    hook: Hook
    layer: int
    position: int
    source: int | None = None


def patches(key: str, cells: Iterable[Cell], alpha: float = 1.0) -> list[StoredSteering]:
    """One entry per cell, from the run `key`."""
    return [
        patch(
            row_name(
                RunRow(
                    key,
                    cell.hook,
                    cell.layer,
                    cell.position if cell.source is None else cell.source,
                )
            ),
            cell.hook,
            [cell.layer],
            [cell.position],
            alpha,
        )
        for cell in cells
    ]


def patch(
    tensor: str,
    hook: Hook,
    layers: list[int],
    positions: PositionSelector,
    alpha: float = 1.0,
    mask: str = "",
) -> StoredSteering:
    """Write the tensor of this name; `mask`: a tensor's name, too."""
    family, tensors = ("replace_masked", [tensor, mask]) if mask else ("replace", [tensor])
    return StoredSteering(
        layers=layers,
        hook=hook,
        positions=positions,
        family=family,
        tensors=tensors,
        numbers=[alpha],
    )  # type: ignore[arg-type]


def for_everyone(version: int, *entries: StoredSteering) -> GlobalSteering:
    """Entries for all positions, as steering of all requests."""
    fields = SteeringTemplate.__struct_fields__
    templates = [
        SteeringTemplate(**{name: getattr(entry, name) for name in fields}) for entry in entries
    ]
    return GlobalSteering(version=version, entries=templates)


def everything(positions: PositionSelector = "all", **options: Any) -> StoredCapture:
    """All hooks of all layers."""
    return capture_of([], positions, sites=EVERYTHING, **options)


def rows_of(host: Host, job: Job, request: int = 0) -> dict[tuple[str, int], np.ndarray]:
    """(hook, layer) → captured rows."""
    reader = host.capture(job)
    return {
        (hook, layer): reader.array(layer, hook, request)
        for hook, layers in job.captures[request][0].sites.items()
        for layer in layers
    }


def edits(
    cells: Iterable[Cell], rows: dict[tuple[str, int], np.ndarray], alpha: float = 1.0
) -> list[Edit]:
    """What `patches` asks for, to the reference. `rows`: the source run's."""

    def row(cell: Cell) -> np.ndarray:
        return rows[cell.hook, cell.layer][cell.position if cell.source is None else cell.source]

    return [
        Edit(cell.layer, row(cell), [cell.position], cell.hook, "replace", alpha) for cell in cells
    ]


def in_one_step(host: Host, jobs: Sequence[Job]) -> None:
    """Or nothing was said about a batch."""
    steps = {receipt.step for job in jobs for receipt in host.receipts(job)}
    assert len(steps) == 1, steps


class Patched(NamedTuple):
    job: Job
    edits: list[Edit]


def patched_batch(
    host: Host, reference: Reference, longest: int = 100, max_tokens: int = 4
) -> list[Patched]:
    """Many kinds of patches, steered and plain requests in one batch; every row of each is what
    transformers says it is.

    `longest`: tokens of the source's prompt; more than a step holds are prefilled in chunks.
    """
    source = host.job(prompt_of(longest, seed=70), max_tokens=1, capture=everything("all_prompt"))
    host.run(source)
    key = host.keep(source)
    rows = rows_of(host, source)
    vector = np.random.default_rng(7).normal(size=rows["post_block", 0].shape[1]).astype(np.float32)
    mean = rows["post_attn", 2][:5].astype(np.float64).mean(0).astype(np.float32)
    scattered = [
        Cell("pre_attn", 1, 3),
        Cell("post_attn", 1, 4, 9),
        Cell("post_block", 2, 3, longest - 1),
        Cell("mlp_out", 0, 5),
        Cell("attn_out", 3, 6),
    ]
    many = [Cell("post_block", 1, position) for position in range(1, 17)]
    meeting = [Cell("post_block", 0, 7, 2), Cell("mlp_in", 0, 7, 3), Cell("pre_attn", 0, 7, 4)]
    made: list[Patched] = []

    def add(length: int, steering: list[StoredSteering], *wanted: Edit) -> None:
        job = host.job(
            prompt_of(length, seed=length),
            max_tokens=max_tokens,
            capture=everything(),
            steering=steering,
        )
        made.append(Patched(job, list(wanted)))

    add(20, patches(key, scattered), *edits(scattered, rows))
    add(longest, patches(key, many), *edits(many, rows))
    add(21, patches(key, meeting, 0.25), *edits(meeting, rows, 0.25))
    add(22, [])
    add(
        24,
        [patch(ZEROS, "mlp_out", [1, 2], [5])],
        *(Edit(layer, 0 * vector, [5], "mlp_out", "replace") for layer in (1, 2)),
    )
    add(
        25,
        [
            patch(
                row_name(RunRow(key, "post_attn", 2, None, (0, 1, 2, 3, 4))), "post_attn", [2], [9]
            )
        ],
        Edit(2, mean, [9], "post_attn", "replace"),
    )
    add(
        23,
        [*patches(key, many[:3]), *host.steering(Edit(1, vector))],
        *edits(many[:3], rows),
        Edit(1, vector),
    )
    fed_back = list(range(18, 17 + max_tokens))
    add(
        18,
        [patch(host.vector(vector), "post_block", [2], "all_generated")],
        Edit(2, vector, fed_back, "post_block", "replace"),
    )
    answers = host.run(*(each.job for each in made))
    for job, wanted in made:
        check_rows(host, reference, job, answers[job.id], wanted)
    return made
