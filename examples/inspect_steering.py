"""Evaluates the demo model with Inspect AI, with and without a steering module, on local prompts.

    make inspect                                      # installs Inspect AI in .cache/inspect
    midstream up &
    .cache/inspect/bin/python examples/inspect_steering.py

1. A direction is the difference of the means of positive and negative texts at one layer
   (examples/sentiment_direction.py is the study); it is registered as a module.
2. The model writes about the topics of examples/data/opinions.jsonl, once as it is and once with
   the module. The score of an answer is its number of positive words minus its number of negative
   ones, each counted once.

Prints both scores, and the mean over topics of their difference. Inspect's logs, which `inspect
view` shows, are written to `--logs`; the module is removed at the end, or kept with `--keep`:

    .cache/inspect/bin/inspect eval examples/inspect_steering.py --model midstream/demo \\
        -M modules=inspect-cheerful
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from inspect_ai import Task, eval, task
from inspect_ai.dataset import json_dataset
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

from midstream import Client

DATA = Path(__file__).with_name("data")
WORDS = json.loads((DATA / "sentiment.json").read_text())
MODULE = "inspect-cheerful"
#: The first token is an attention sink, a hundred times larger than the others.
FIRST = 1


def direction(client: Client, model: str, layer: int, pairs: list[tuple[str, str]]) -> np.ndarray:
    """`[hidden]`: the mean over positive texts minus the mean over negative ones."""
    texts = [text for pair in pairs for text in pair]
    capture = {"layers": layer, "positions": "all_prompt"}
    job = client.run(
        model=model, prompts=texts, sampling={"max_tokens": 0}, capture=capture, progress=False
    )
    with client.capture(job) as rows:
        means = np.stack(
            [
                rows.array(layer, request=request)[FIRST:].astype(np.float32).mean(axis=0)
                for request in rows.requests()
            ]
        )
    return np.asarray(means[0::2].mean(axis=0) - means[1::2].mean(axis=0))


@scorer(metrics=[mean(), stderr()])
def word_score() -> Scorer:
    """Positive minus negative words of an answer."""
    positive, negative = set(WORDS["positive_words"]), set(WORDS["negative_words"])

    async def score(state: TaskState, target: Target) -> Score:
        words = set(re.findall(r"[a-z]+", state.output.completion.lower()))
        return Score(
            value=len(words & positive) - len(words & negative), answer=state.output.completion
        )

    return score


@task
def opinions(tokens: int = 48) -> Task:
    """Two sentences about each topic, with greedy sampling."""
    config = GenerateConfig(temperature=0, max_tokens=tokens)
    return Task(
        dataset=json_dataset(str(DATA / "opinions.jsonl")),
        solver=generate(),
        scorer=word_score(),
        config=config,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", type=int, default=17)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--logs", default=".midstream/inspect")
    parser.add_argument("--keep", action="store_true", help="keep the module")
    asked = parser.parse_args()
    scores: list[np.ndarray] = []
    with Client() as client:
        name = client.models()[0]
        found = direction(client, name, asked.layer, WORDS["pairs"])
        client.modules.put(MODULE, [{"layers": asked.layer, "vector": found}])
        try:
            for label, arguments in (
                ("without", {}),
                ("with the module", {"modules": {MODULE: asked.scale}}),
            ):
                model = get_model(f"midstream/{name}", memoize=False, **arguments)
                (log,) = eval(
                    opinions(asked.tokens), model=model, display="none", log_dir=asked.logs
                )
                if log.status != "success" or log.results is None:
                    raise SystemExit(
                        f"the evaluation {label} ended as {log.status}: "
                        f"{log.error and log.error.message}"
                    )
                metrics, samples = log.results.scores[0].metrics, log.samples or []
                print(
                    f"{label}: {metrics['mean'].value:+.2f} (standard error "
                    f"{metrics['stderr'].value:.2f}, {len(samples)} samples)"
                )
                print(
                    f"  job {samples[0].output.metadata['midstream']['job']}: "
                    f"{samples[0].output.completion.splitlines()[0][:100]}"
                )
                by_topic = {
                    str(sample.id): float((sample.scores or {})["word_score"].value)
                    for sample in samples
                }
                scores.append(np.array([by_topic[topic] for topic in sorted(by_topic)]))
        finally:
            if not asked.keep:
                client.modules.delete(MODULE)
    change = scores[1] - scores[0]
    print(
        f"difference: {change.mean():+.2f} (standard error "
        f"{change.std(ddof=1) / len(change) ** 0.5:.2f})"
    )


if __name__ == "__main__":
    main()
