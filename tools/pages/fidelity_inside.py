"""How far are rows inside attention and MLP from transformers' rows, plain and edited: for every
architecture and hook? v1, eager, fp32.

It writes the last table of docs/reference/fidelity.md and is a part of `make fidelity`.

The engine proves its hooks at the start, as in service. One request is plain; for each hook another
has an addition there in layer 1 and a replacement in layer 2. Every row at every hook inside, and
what leaves each layer, is compared.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from families import BF16_ONLY, CHANGED, FAMILIES, checkpoint
from fidelity import ADD_LAYER, ADDED, ALL, PROMPT, REPLACE_LAYER, REPLACED, nursery_for, options_of
from fidelity_page import PAGE, Figure, Way, parse
from host import Host, prompt_of, relative_error
from inside_reference import InsideReference
from nursery import Nursery
from reference import Edit
from tiny import CHECKPOINTS

from midstream.api.resolve.positions.captures import Bounds, PromptFacts, resolve_captures
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import INSIDE
from midstream.schemas.requests.specs import CaptureSpec

#: The part of the page between these lines is written here.
BEGIN = "<!-- written by `make fidelity`: hooks inside -->"
END = "<!-- end of the hooks inside -->"
WAY = Way("v1", "eager", "float32")
#: In a cell: the model does not have the hook; or it has, and the tests' reference does not find it
#: in transformers' layers.
NONE = "–"
UNCOMPARED = "not compared"
#: Checkpoint → hook → its figure.
Table = Mapping[str, Mapping[str, str]]


def engine(nursery: Nursery, directory: Path, name: str, path: Path) -> Host:
    """An engine that serves every hook inside that it can prove."""
    blocks = {"engine.block_size": 32} if name in FAMILIES else {}
    settings = options_of(WAY) | blocks | {"hooks": "all,inside", "certify": True}
    return nursery.host(directory, path, CHANGED.get(name), **settings)


def measure(host: Host, reference: InsideReference) -> dict[str, str]:
    """Hook → figure as text, of a running engine."""
    hooks = [hook for hook in INSIDE if hook in host.info["hooks"]]
    jobs = {}
    edits = {"": list[Edit]()}
    for number, hook in enumerate(hooks, 1):
        shape = host.info["inside"][hook]
        added, put = 4 * np.random.default_rng(number).normal(
            size=(2, shape["heads"] * shape["width"])
        ).astype(np.float32)
        edits[hook] = [
            Edit(ADD_LAYER, added, ADDED, hook),
            Edit(REPLACE_LAYER, put, REPLACED, hook, "replace"),
        ]
    for number, hook in enumerate(edits):
        jobs[hook] = _capturing(
            host,
            hooks,
            host.job(
                prompt_of(PROMPT, seed=number), max_tokens=3, steering=host.steering(*edits[hook])
            ),
        )
    host.run(*jobs.values())
    errors = {hook: _errors(host, job, reference, edits[hook]) for hook, job in jobs.items()}
    compared = [hook for hook in hooks if hook in errors[""]]
    return {
        hook: str(Figure(errors[""][hook], max(errors[hook].values())))
        if hook in compared
        else UNCOMPARED
        for hook in hooks
    }


def _capturing(host: Host, hooks: Sequence[str], job: Job) -> Job:
    spec = CaptureSpec(hooks=dict.fromkeys((*hooks, "post_block"), "all"), positions="all")
    bounds = Bounds(
        msgspec.convert(host.info, ModelInfo), [PromptFacts(PROMPT)], job.sampling.max_tokens
    )
    return msgspec.structs.replace(job, captures=resolve_captures(spec, bounds))


def _errors(
    host: Host, job: Job, reference: InsideReference, edits: Sequence[Edit]
) -> dict[str, float]:
    """Hook → largest error of a row, of those that the reference has."""
    reader = host.capture(job)
    rows = reference.rows(reader.token_ids(), *edits)
    hooks = [hook for hook in reader.hooks() if (hook, 0) in rows]
    return {
        hook: max(relative_error(reader.array(layer, hook), rows[hook, layer]) for layer in ALL)
        for hook in hooks
    }


def read_table(text: str) -> dict[str, dict[str, str]]:
    """The figures of the page: only hooks that the model has."""
    lines = [
        line
        for line in text[text.index(BEGIN) : text.index(END)].splitlines()
        if line.startswith("| `")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        row[0].strip("`"): {
            hook: cell for hook, cell in zip(INSIDE, row[1:], strict=True) if cell != NONE
        }
        for row in cells
    }


def write_table(text: str, table: Table) -> str:
    """The page with these figures, in the order of `CHECKPOINTS` and `FAMILIES`."""
    lines = [
        "| checkpoint | " + " | ".join(f"`{hook}`" for hook in INSIDE) + " |",
        "|---|" + "---|" * len(INSIDE),
    ]
    names = [name for name in [*CHECKPOINTS, *FAMILIES] if name in table]
    lines += [
        f"| `{name}` | " + " | ".join(table[name].get(hook, NONE) for hook in INSIDE) + " |"
        for name in names
    ]
    before = text[: text.index(BEGIN) + len(BEGIN)]
    after = text[text.index(END) :]
    return f"{before}\n\n" + "\n".join(lines) + f"\n\n{after}"


def main(names: Sequence[str]) -> None:
    """Measure the named checkpoints, or all of the table of architectures; other rows of the page
    stay.
    """
    table = read_table(PAGE.read_text())
    exceeded = []
    with (
        tempfile.TemporaryDirectory() as folder,
        nursery_for(WAY.runner, Path(folder) / "nursery") as nursery,
    ):
        for name in (name for name in names or CHECKPOINTS if name not in BF16_ONLY):
            started = time.monotonic()
            path = checkpoint(name, Path(folder) / "checkpoints" / name)
            host = engine(nursery, Path(folder) / name, name, path)
            try:
                table[name] = measure(host, InsideReference(path))
            finally:
                host.close()
            exceeded += [
                f"{name} {hook}: {cell}" for hook, cell in table[name].items() if beyond(cell)
            ]
            print(
                (
                    f"{name}: {table[name]}, {time.monotonic() - started:.1f} s; absent: "
                    f"{host.info['absent']}"
                ),
                flush=True,
            )
            PAGE.write_text(write_table(PAGE.read_text(), table))
    if exceeded:
        sys.exit("beyond their tolerance:\n" + "\n".join(exceeded))


def beyond(cell: str) -> bool:
    """Whether a figure is beyond its tolerance."""
    return cell != UNCOMPARED and not 0 < parse(cell).worst <= WAY.tolerance


if __name__ == "__main__":
    main(sys.argv[1:])
