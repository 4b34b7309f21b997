"""Evaluates the demo model with Inspect AI, with and without a steering module, on local prompts.

    make inspect                                      # Inspect AI, in an environment of its own: .cache/inspect
    midstream up &
    .cache/inspect/bin/python examples/inspect_steering.py

1. A direction is the difference of the means of positive and negative texts at one layer (examples/sentiment_direction.py is the study);
   it is registered as a module.
2. The model writes about the topics of examples/data/opinions.jsonl, once as it is and once with the module. The score of an answer is
   its number of positive words minus its number of negative ones, each counted once.

Prints both scores. Inspect's logs, which `inspect view` shows, are written to `--logs`; the module is removed at the end.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from inspect_ai import Task, eval
from inspect_ai.dataset import json_dataset
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

from midstream import Client

DATA = Path(__file__).with_name("data")
MODULE = "inspect-cheerful"
#: The first token is an attention sink, a hundred times larger than the others.
FIRST = 1


def direction(client: Client, model: str, layer: int, pairs: list[tuple[str, str]]) -> np.ndarray:
    """`[hidden]`: the mean over positive texts minus the mean over negative ones."""
    texts = [text for pair in pairs for text in pair]
    capture = {"layers": layer, "positions": "all_prompt"}
    job = client.run(model=model, prompts=texts, sampling={"max_tokens": 1}, capture=capture, progress=False)
    with client.capture(job) as rows:
        means = np.stack([rows.array(layer, request=request)[FIRST:].astype(np.float32).mean(axis=0) for request in rows.requests()])
    return np.asarray(means[0::2].mean(axis=0) - means[1::2].mean(axis=0))


@scorer(metrics=[mean(), stderr()])
def word_score(positive: list[str], negative: list[str]) -> Scorer:
    """Positive minus negative words of an answer."""

    async def score(state: TaskState, target: Target) -> Score:
        words = set(re.findall(r"[a-z]+", state.output.completion.lower()))
        return Score(value=len(words & set(positive)) - len(words & set(negative)), answer=state.output.completion)

    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, default=17)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--logs", default=".midstream/inspect")
    asked = parser.parse_args()
    words = json.loads((DATA / "sentiment.json").read_text())
    task = Task(
        dataset=json_dataset(str(DATA / "opinions.jsonl")), solver=generate(),
        scorer=word_score(words["positive_words"], words["negative_words"]),
        config=GenerateConfig(temperature=0, max_tokens=asked.tokens),
    )  # fmt: skip
    with Client() as client:
        name = client.models()[0]
        found = direction(client, name, asked.layer, words["pairs"])
        client.register_module(MODULE, [{"layers": asked.layer, "vector": found}])
        try:
            for label, arguments in (("without", {}), ("with the module", {"modules": {MODULE: asked.scale}})):
                model = get_model(f"midstream/{name}", memoize=False, **arguments)
                (log,) = eval(task, model=model, display="none", log_dir=asked.logs)
                if log.status != "success" or log.results is None:
                    raise SystemExit(f"the evaluation {label} ended as {log.status}: {log.error and log.error.message}")
                metrics = log.results.scores[0].metrics
                score, error = metrics["mean"].value, metrics["stderr"].value
                print(f"{label}: {score:+.2f} (standard error {error:.2f}, {len(log.samples or [])} samples)")
                sample = (log.samples or [])[0]
                print(f"  job {sample.output.metadata['midstream']['job']}: {sample.output.completion.splitlines()[0][:100]}")
        finally:
            client.unregister_module(MODULE)


if __name__ == "__main__":
    main()
