"""Finds the heads with which SmolLM2-135M names the indirect object: the study of
`packages/lab/docs/patching.md`.

    midstream up --set hooks=all,inside &
    python examples/heads_ioi.py --out heads-study

After “When Mary and John went to the store, John gave a drink to” the model says “ Mary”: the name
that is not said twice. Which heads do that (Wang et al. 2022, arXiv:2211.00593)? Each of 56 prompts
has a corrupt twin in which the other name is said twice. The outputs of one head (`z`), at all
positions, are written from a prompt into its twin, and the share of the logit difference that this
recovers is measured: every head of the upper layers, all pairs, in one job. Then, with all other
attention held: what the heads that matter add to the logits themselves (a path to the logits),
whose outputs the queries of the strongest one's layer read (a path to `q`), and what that head in
turn has in its values (a path to `v`). The script prints tables, and writes figures and saved
studies.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np

from midstream import Client, PatchStudy
from midstream_lab.client.grid import Grid

#: Names of one token each, with the space before them.
NAMES = [
    ("Mary", "John"),
    ("Sarah", "David"),
    ("Anna", "Peter"),
    ("Alice", "James"),
    ("Laura", "Robert"),
    ("Emma", "Paul"),
    ("Kate", "Mark"),
]
TEMPLATES = (
    "When{} and{} went to the store,{} gave a drink to",
    "When{} and{} had a long talk,{} gave a book to",
    "After{} and{} came to the office,{} handed a letter to",
    "Then{} and{} sat in the garden, and{} gave a flower to",
)
#: Below, no head recovers more than 0.02, which is the noise in bfloat16: the first of the sweeps
#: shows it.
LAYERS = "14-29"
#: Pairs of the sweep over all layers, and of the paths to queries.
FEW = 8


def pairs() -> list[dict[str, str]]:
    """56: every template with every two names, each of them said twice once."""
    found = []
    for template, names in product(TEMPLATES, NAMES):
        for one, other in (names, names[::-1]):
            one, other = f" {one}", f" {other}"
            found.append(
                {
                    "clean": template.format(one, other, other),
                    "corrupt": template.format(one, other, one),
                    "answer": one,
                    "foil": other,
                }
            )
    return found


def strongest(grid: Grid, spread: np.ndarray, count: int = 8) -> str:
    """The heads of a grid that change most, over the pairs."""
    lines = ["| head | mean | standard deviation |", "|---|---|---|"]
    for cell in grid.top(count):
        lines.append(
            f"| {cell.layer}.{cell.head} | {cell.effect:+.3f} | "
            f"{spread[grid.layers.index(cell.layer), cell.column]:.3f} |"
        )
    return "\n".join(lines)


def report(name: str, study: PatchStudy, out: Path) -> None:
    study.save(out / f"{name}.json")
    study.plot(out / f"{name}.png")
    summary = study.result.summary
    print(
        f"\n{name}: {summary.cells} cells of {len(study.result.pairs)} pairs in "
        f"{summary.seconds:.0f} s"
    )
    (hook,) = study.result.hooks
    spread = np.array(study.result.spread[hook], dtype=float)
    print(strongest(study.grid(), spread))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("heads-study"))
    parser.add_argument("--url", default=None)
    parser.add_argument("--pairs", type=int, default=None, help="of 56; fewer for a quick look")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    every = pairs()[: options.pairs]
    started = time.perf_counter()
    with Client(options.url) as client:
        few = PatchStudy.pairs(every[:: max(len(every) // FEW, 1)], client=client)
        report("all-layers", few.sweep(hooks=["z"], axis="head", noise=1), options.out)
        study = PatchStudy.pairs(every, client=client)
        report("heads", study.sweep(hooks=["z"], axis="head", layers=LAYERS, noise=1), options.out)
        layers = sorted({cell.layer for cell in study.top(8)})
        direct = PatchStudy.pairs(every, client=client)
        path = {"receivers": "logits", "frozen": ["attn"]}
        report(
            "logits",
            direct.sweep(hooks=["z"], axis="head", layers=layers, path=path, noise=1),
            options.out,
        )
        for name, hook in (
            ("queries", "q"),
            ("values", "v"),
        ):  # what the strongest head's layer is told at q, and at v of the head that adds to them
            layer = max(direct.top(8), key=lambda cell: cell.effect).layer
            direct = PatchStudy.pairs(few.request.pairs, client=client)
            path = {"receivers": [{"layer": layer, "hook": hook}], "frozen": ["attn"]}
            report(
                name,
                direct.sweep(
                    hooks=["z"], axis="head", layers=f"10-{layer - 1}", path=path, noise=1
                ),
                options.out,
            )
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
