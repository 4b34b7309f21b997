"""Traces where SmolLM2-135M represents three facts, and when the last token receives them: the
study of `packages/lab/docs/patching.md`.

    midstream up &
    python examples/causal_tracing.py --out tracing-study

Each fact has two prompts that differ only in their subject. Rows of the clean one are written into
the corrupt one, one layer and one token at a time, in the residual stream, the attention branch or
the MLP branch, and the recovered share of the logit difference is measured (causal tracing: Meng et
al. 2022, arXiv:2202.05262; with two real prompts instead of noise: Wang et al. 2022,
arXiv:2211.00593; pitfalls: Zhang and Nanda 2023, arXiv:2309.16042). Further sweeps: the three facts
together, by parts of the sentence; the same in the other direction; and the answer without the last
token's attention. The script writes a figure and a saved study for each sweep, and prints tables.
"""

import argparse
import time
from pathlib import Path

from midstream import Client, PatchStudy
from midstream_lab.client.grid import Grid

HOOKS = ["resid_pre", "attn_out", "mlp_out"]
#: Clean, corrupt, answer, foil, the subject in both.
FACTS = {
    "tower": (
        "The Eiffel Tower is located in the city of",
        "The Colosseum is located in the city of",
        " Paris",
        " Rome",
        "Eiffel Tower",
        "Colosseum",
    ),
    "wall": (
        "The Great Wall is located in the country of",
        "The Taj Mahal is located in the country of",
        " China",
        " India",
        "Great Wall",
        "Taj Mahal",
    ),
    "capital": (
        "The capital of Japan is",
        "The capital of France is",
        " Tokyo",
        " Paris",
        "Japan",
        "France",
    ),
}
LAYERS_SHOWN = (0, 4, 8, 12, 16, 20, 22, 23, 24, 26, 29)


def spanned(fact: tuple[str, ...]) -> dict[str, object]:
    """A pair with two columns: the subject and the last token."""
    clean, corrupt, answer, foil, subject, other = fact
    spans = [
        {"name": "subject", "clean": {"text": subject}, "corrupt": {"text": other}},
        {"name": "last token", "clean": [-1]},
    ]
    return {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil, "spans": spans}


def table(grid: Grid, hook_index: int = 0) -> str:
    """Some layers of one hook: shares in percent, or changes in nats."""
    hook = grid.hooks[hook_index]
    rows = [layer for layer in LAYERS_SHOWN if layer in grid.layers]
    lines = [
        f"| {hook} at layer | " + " | ".join(map(str, rows)) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for column in range(len(grid.labels)):
        values = [grid.effects[hook][grid.layers.index(layer), column] for layer in rows]
        cells = [
            str(round(100 * value)) if grid.metric == "recovered" else f"{value:+.1f}"
            for value in values
        ]
        lines.append(f"| {grid.names[column]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(name: str, study: PatchStudy, out: Path) -> None:
    """Print one sweep's tables; write its figure and the study to files."""
    result, grid = study.result, study.grid()
    print(f"\n## {name}\n")
    for number, pair in enumerate(result.pairs):
        prompts = {"patched": pair.base, "source": pair.source}
        told = [
            f"{name} prompt {baseline.value:.2f} nats"
            for name, baseline in prompts.items()
            if baseline
        ]
        print(
            f"pair {number}: {', '.join(told)}; noise floor {pair.noise_floor or 0:.4f} "
            f"{pair.notes or ''}"
        )
    print(
        f"{result.summary.cells} cells in {result.summary.seconds:.1f} s, "
        f"{result.summary.skipped} skipped\n"
    )
    for number in range(len(grid.hooks)):
        print(table(grid, number), "\n")
    for cell in study.top(5):
        spread = result.spread[cell.hook][grid.layers.index(cell.layer)][cell.column]
        print(
            f"{cell.hook} layer {cell.layer}, {cell.label.strip()}: {cell.value:.2f}"
            + (f" ± {spread:.2f}" if spread is not None else "")
        )
    study.plot(out / f"{name}.png")
    study.save(out / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8321")
    parser.add_argument("--out", type=Path, default=Path("tracing-study"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with Client(options.url) as client:
        model = client.models()[0]
        for name, fact in FACTS.items():
            study = PatchStudy(*fact[:4], client=client, model=model).sweep(hooks=HOOKS)
            report(name, study, options.out)
        together = PatchStudy.pairs(
            [spanned(fact) for fact in FACTS.values()], client=client, model=model
        )
        report("denoise", together.sweep(hooks=HOOKS), options.out)
        report("noise", together.sweep(hooks=HOOKS, direction="noise"), options.out)
        alone = PatchStudy.pairs(
            [(clean, None, answer, foil) for clean, _, answer, foil, *_ in FACTS.values()],
            client=client,
            model=model,
        )
        without = alone.sweep(
            hooks=["attn_out"], positions=[-1], ablation="zeros", metric="logit_diff"
        )
        report("ablation", without, options.out)
    print(f"\n{time.monotonic() - began:.0f} s; figures and studies in {options.out}")


if __name__ == "__main__":
    main()
