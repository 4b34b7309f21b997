"""Learns to steer towards positive text by three methods, and measures what each changes.

    midstream up --set gradients=true          # in one terminal
    python examples/learn_sentiment.py         # in another (--url, if it is not on port 8321)

1. `data/joy.jsonl` has 24 pairs of a positive and a negative text, and 24 prompts with a positive
   continuation. `difference_of_means` and `logistic` are fitted to the pairs and measured on the
   continuations; `reft` is fitted to half of the continuations and measured on others.
2. 40 prompts about eight topics that no example has are continued, plain and steered. Texts are
   scored by words of a list, without the words of the examples.

Prints tables in Markdown; writes `fits.png` to `--out` (extra `plots`).
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from midstream import Client
from midstream_lab.records.fits import FitResult

DATA = Path(__file__).with_name("data")
#: Each text is read from its second token on: the first one's row is an outlier.
READ = {"read": {"start": 1}}
METHODS: dict[str, dict[str, Any]] = {
    "difference_of_means": READ,
    "logistic": READ,
    "reft": {"held_out": 0.5, "steps": 100},
}
LAYER = 17
SCALES = (0.5, 1.0, 2.0)
SHOWN_SCALE = 1.0
#: Topics of `sentiment.json` that the examples have.
USED = 12
MAX_TOKENS = 32


def read() -> tuple[dict[str, Any], list[str], dict[str, int]]:
    """Return the examples as a fit takes them, prompts about other topics, and words → ±1."""
    text = (DATA / "joy.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    pairs, examples = ([line for line in lines if key in line] for key in ("positive", "target"))
    fields = {
        "positive": [line["positive"] for line in pairs],
        "negative": [line["negative"] for line in pairs],
        "examples": examples,
    }
    study = json.loads((DATA / "sentiment.json").read_text())
    prompts = [frame.format(topic) for topic in study["topics"][USED:] for frame in study["frames"]]
    seen = set(words_of(text))
    words = dict.fromkeys(study["positive_words"], 1) | dict.fromkeys(study["negative_words"], -1)
    return fields, prompts, {word: value for word, value in words.items() if word not in seen}


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def fitted(client: Client, model: str, method: str, fields: dict[str, Any]) -> FitResult:
    own = fields if method != "reft" else {"examples": fields["examples"]}
    return client.fit_module(
        model=model,
        name=f"joy-{method}",
        method=method,
        layers=LAYER,
        register="always",  # so that the texts show what a module without an effect does
        **own,
        **METHODS[method],
    )


def table(results: dict[str, FitResult]) -> str:
    lines = [
        "| method | separation of held-out texts | log-probability of held-out continuations, nats "
        "| better | dose |",
        "|---|---|---|---|---|",
    ]
    for method, result in results.items():
        effect, (site,) = result.training.effect, result.training.sites
        lines.append(
            f"| `{method}` | {'–' if site.auroc is None else f'{site.auroc:.2f}'} "
            f"| {effect.before:.2f} → {effect.after:.2f} ± {effect.error:.2f} ({effect.examples}) "
            f"| {'yes' if effect.better else 'no'} | {site.dose:.2f} |"
        )
    return "\n".join(lines)


def draw(
    path: Path, results: dict[str, FitResult], scores: dict[tuple[str, float], np.ndarray]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, words) = pyplot.subplots(1, 2, figsize=(8, 2.9), constrained_layout=True)
    points = results["reft"].training.losses
    trained = [point for point in points if point.loss is not None]
    losses.plot([p.step for p in trained], [p.loss for p in trained], label="training")
    losses.plot([p.step for p in points], [p.validation_loss for p in points], label="validation")
    losses.axvline(results["reft"].training.steps, color="grey", linestyle=":", label="kept")
    losses.set(title="reft: losses", xlabel="step", ylabel="nats per target token")
    for method in results:
        values = np.array([scores[method, scale].mean() for scale in (0.0, *SCALES)])
        words.plot((0.0, *SCALES), values, "o-", label=method)
    words.set(title="positive − negative words in a text", xlabel="scale of the module")
    for axis in (losses, words):
        axis.legend(frameon=False, fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8321")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    fields, prompts, words = read()
    with Client(options.url) as client:
        model = client.models()[0]
        results = {method: fitted(client, model, method, fields) for method in METHODS}
        print(table(results), flush=True)

        def written(steering: list[dict[str, Any]]) -> list[str]:
            sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
            job = client.run(model=model, prompts=prompts, sampling=sampling, steering=steering)
            return [" ".join(output.text.split()) for output in job.outputs]

        plain = written([])
        texts = {
            (method, scale): written([{"module": f"joy-{method}", "scale": scale}])
            for method in METHODS
            for scale in SCALES
        } | {(method, 0.0): plain for method in METHODS}
    scores = {
        key: np.array([sum(words.get(word, 0) for word in set(words_of(text))) for text in found])
        for key, found in texts.items()
    }
    print("\n| method | " + " | ".join(f"scale {scale:g}" for scale in (0.0, *SCALES)) + " |")
    print("|---" * (len(SCALES) + 2) + "|")
    for method in METHODS:
        cells = [scores[method, scale] for scale in (0.0, *SCALES)]
        shown = [
            f"{cell.mean():+.2f} ({(cell > 0).mean():.0%} / {(cell < 0).mean():.0%})"
            for cell in cells
        ]
        print(f"| `{method}` | " + " | ".join(shown) + " |")
    for number in (0, 16, 31):
        print(f"\n**{prompts[number]}** …\n\n| | |\n|---|---|\n| plain | {plain[number]} |")
        for method in METHODS:
            print(f"| `{method}` | {texts[method, SHOWN_SCALE][number]} |")
    draw(options.out / "fits.png", results, scores)


if __name__ == "__main__":
    main()
