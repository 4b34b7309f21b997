"""Steers a model with a direction from captured activations towards positive or negative text, and
measures effect and cost.

    midstream up                                   # in one terminal
    python examples/sentiment_direction.py         # in another (--url, if it is not on port 8321)

1. 64 short texts, half of them positive, are captured at every layer; for each layer, the direction
   is the difference of the means (difference of means: Marks and Tegmark 2023, arXiv:2310.06824;
   added to the stream: Turner et al. 2023, arXiv:2308.10248). Scale 1 therefore moves the stream by
   the difference between the two means.
2. A sweep over layers, on separate prompts, finds the layer where the direction changes the words
   most.
3. 100 neutral prompts are continued at each scale, and along random directions of the same norm as
   a control. Three scores, all independent of the direction: words of a list, the unsteered model's
   own judgement, and likelihood and diversity of the text.

Prints tables in Markdown; writes `results.json`, `sentiment.png` and the direction as
`sentiment.npy` to `--out`. The checkpoint's last matrix is read from `--checkpoint`: the server
returns log-probabilities only for text it generates, and these texts are not.
"""

import argparse
import itertools
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from midstream import CaptureReader, Client
from midstream.schemas.base.dtypes import bfloat16_to_float32

DATA = Path(__file__).with_name("data") / "sentiment.json"
CHECKPOINT = Path.home() / ".cache" / "midstream" / "models" / "SmolLM2-135M-Instruct"
SCALES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
#: Scale of the sweep over layers.
SWEEP_SCALE = 1.0
CONTROL_SCALE = 2.0
CONTROLS = 3
MAX_TOKENS = 32
#: The first token's activation is a sink a hundred times larger than the rest, and carries no
#: information about the text.
SINK = 1
RESAMPLES = 2000
#: Samples are shown for the first prompt, and for two chosen for their contrast.
SHOWN = (0, 30, 76)


@dataclass(frozen=True)
class Materials:
    """Texts and words, all written for this study."""

    positive: list[str]
    negative: list[str]
    shots: list[tuple[str, str]]  # positive, negative: for the judge
    prompts: list[str]
    sweep_prompts: list[str]
    words: dict[str, int]  # word → 1 or -1; none of them occurs in the contrasted texts


def materials(path: Path = DATA) -> Materials:
    raw = json.loads(path.read_text())
    pairs = raw["pairs"]
    seen = set(_words(" ".join(text for pair in pairs for text in pair)))
    words = dict.fromkeys(raw["positive_words"], 1) | dict.fromkeys(raw["negative_words"], -1)
    return Materials(
        positive=[positive for positive, _ in pairs],
        negative=[negative for _, negative in pairs],
        shots=[(positive, negative) for positive, negative in raw["held_out_pairs"]],
        prompts=[frame.format(topic) for topic in raw["topics"] for frame in raw["frames"]],
        sweep_prompts=[
            frame.format(topic) for topic in raw["sweep_topics"] for frame in raw["frames"]
        ],
        words={word: sign for word, sign in words.items() if word not in seen},
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def word_score(text: str, words: dict[str, int]) -> int:
    """Positive minus negative words, each counted once: a text that repeats itself gains
    nothing.
    """
    return sum(words.get(word, 0) for word in set(_words(text)))


def varied(token_ids: list[int]) -> float:
    """Share of distinct pairs among all pairs of adjacent tokens (distinct-2: Li et al. 2016,
    arXiv:1510.03055).
    """
    pairs = list(itertools.pairwise(token_ids))
    return len(set(pairs)) / max(len(pairs), 1)


def difference_of_means(positive: list[np.ndarray], negative: list[np.ndarray]) -> np.ndarray:
    """`[layers, hidden]`: mean over positive texts minus mean over negative ones.

    Of each text: its stream `[layers, positions, hidden]`; a text counts once, however long it is.
    """
    means = [
        np.stack([text[:, SINK:].mean(axis=1) for text in texts]).mean(axis=0)
        for texts in (positive, negative)
    ]
    return np.asarray(means[0] - means[1])


def interval(values: np.ndarray) -> tuple[float, float]:
    """Bootstrap over prompts: 2.5th and 97.5th percentile of the mean."""
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def weight(path: Path, name: str) -> np.ndarray:
    """A tensor of a safetensors file in bfloat16 or float32, as float32."""
    raw = np.memmap(path, mode="r")
    length = int(raw[:8].view("<u8")[0])
    entry = json.loads(raw[8 : 8 + length].tobytes())[name]
    first, last = (8 + length + offset for offset in entry["data_offsets"])
    values = (
        raw[first:last].view({"BF16": "<u2", "F32": "<f4"}[entry["dtype"]]).reshape(entry["shape"])
    )
    return bfloat16_to_float32(values) if entry["dtype"] == "BF16" else np.asarray(values)


class Unembedding:
    """Log-probabilities from the stream that leaves the last block: the final norm reads
    `post_block` of the last layer.
    """

    def __init__(self, checkpoint: Path):
        config = json.loads((checkpoint / "config.json").read_text())
        tied = config["tie_word_embeddings"]
        self._head = weight(
            checkpoint / "model.safetensors",
            "model.embed_tokens.weight" if tied else "lm_head.weight",
        )
        self._norm = weight(checkpoint / "model.safetensors", "model.norm.weight")
        self._epsilon = config["rms_norm_eps"]

    def logprobs(self, rows: np.ndarray, token_ids: list[int]) -> np.ndarray:
        """Log-probability of `token_ids[i]` after `rows[i]` `[tokens, hidden]`; `[tokens]`, in
        nats.
        """
        normed = (
            rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + self._epsilon) * self._norm
        )
        logits = normed @ self._head.T
        top = logits.max(axis=1, keepdims=True)
        log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        return np.asarray(logits[np.arange(len(token_ids)), token_ids] - log_sum)


@dataclass(frozen=True)
class Text:
    """One continuation."""

    prompt: str
    text: str
    token_ids: list[int]
    logprobs: list[float]  # as generated, under whatever steering there was


class Study:
    """The study's calls to the server."""

    def __init__(self, client: Client, model: str, found: Materials, temperature: float = 0.0):
        self._client, self._model, self.found = client, model, found
        self._sampling = {
            "max_tokens": MAX_TOKENS,
            "logprobs": 0,
            "ignore_eos": True,
            "temperature": temperature,
            "seed": 0,
        }
        self._token_ids: dict[str, list[int]] = {}

    def directions(self) -> tuple[np.ndarray, np.ndarray]:
        """The direction `[layers, hidden]`, and the mean norm of the texts' mean activations
        `[layers]`.
        """
        texts = [*self.found.positive, *self.found.negative]
        streams = self._streams(texts, "all")
        half = len(self.found.positive)
        lengths = np.stack(
            [np.linalg.norm(stream[:, SINK:].mean(axis=1), axis=-1) for stream in streams]
        ).mean(axis=0)
        return difference_of_means(streams[:half], streams[half:]), lengths

    def write(
        self,
        prompts: list[str],
        layer: int | None = None,
        vector: np.ndarray | None = None,
        scale: float = 0.0,
    ) -> list[Text]:
        """Continuations; unsteered if no layer is given."""
        steering = [] if layer is None else [{"layers": layer, "vector": vector, "scale": scale}]
        result = self._client.run(
            model=self._model, prompts=prompts, sampling=self._sampling, steering=steering
        )
        return [
            Text(
                prompt,
                output.text,
                output.token_ids,
                [each.logprob for each in output.logprobs or []],
            )
            for prompt, output in zip(prompts, result.outputs, strict=True)
        ]

    def judge(self, texts: list[str]) -> np.ndarray:
        """The unsteered model's log P(positive) − log P(negative) after a few examples.

        Of a word that is not among its first 20, a bound.
        """
        shots = "".join(
            f"Text: {text}\nFeeling: {word}\n\n"
            for pair in self.found.shots
            for text, word in _labelled(pair)
        )
        prompts = [f"{shots}Text: {_one_line(text)}\nFeeling:" for text in texts]
        result = self._client.run(
            model=self._model, prompts=prompts, sampling={"max_tokens": 1, "logprobs": 20}
        )
        margins = []
        for output in result.outputs:
            assert output.logprobs is not None
            chances = {choice.token.strip(): choice.logprob for choice in output.logprobs[0].top}
            floor = min(chances.values())
            margins.append(chances.get("positive", floor) - chances.get("negative", floor))
        return np.array(margins)

    def likelihood(self, texts: list[Text], unembedding: Unembedding) -> list[np.ndarray]:
        """Log-probability of each generated token under the unsteered model, from captures of its
        last layer.
        """
        prompts = self._tokenised([text.prompt for text in texts])
        whole = [prompt + text.token_ids for prompt, text in zip(prompts, texts, strict=True)]
        rows = self._streams(whole, [-1])
        return [
            unembedding.logprobs(stream[0][len(prompt) - 1 : -1], text.token_ids)
            for prompt, text, stream in zip(prompts, texts, rows, strict=True)
        ]

    def _streams(self, prompts: list[Any], layers: Any) -> list[np.ndarray]:
        """The stream of each prompt, `[layers, positions, hidden]` float32."""
        with self._captured(prompts, layers) as reader:
            return [reader.stack(request=request) for request in reader.requests()]

    def _tokenised(self, prompts: list[str]) -> list[list[int]]:
        """Token ids of texts, read once from a capture."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._token_ids]
        if new:
            with self._captured(new, [-1]) as reader:
                self._token_ids |= {
                    prompt: reader.token_ids(request) for request, prompt in enumerate(new)
                }
        return [self._token_ids[prompt] for prompt in prompts]

    def _captured(self, prompts: list[Any], layers: Any) -> CaptureReader:
        capture = {"layers": layers, "positions": "all_prompt", "tag": "sentiment"}
        job = self._client.run(
            model=self._model, prompts=prompts, capture=capture, sampling={"max_tokens": 0}
        )
        return self._client.capture(job.id)


def _labelled(pair: tuple[str, str]) -> list[tuple[str, str]]:
    return list(zip(pair, ("positive", "negative"), strict=True))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def sweep(
    study: Study, directions: np.ndarray, layers: list[int]
) -> dict[int, tuple[float, float]]:
    """Layer → mean word score when its direction is subtracted, and when it is added."""
    found = {}
    for layer in layers:
        ends = [
            study.write(study.found.sweep_prompts, layer, directions[layer], sign * SWEEP_SCALE)
            for sign in (-1, 1)
        ]
        low, high = (
            float(np.mean([word_score(text.text, study.found.words) for text in texts]))
            for texts in ends
        )
        found[layer] = (low, high)
    return found


def measure(study: Study, texts: list[Text], unembedding: Unembedding) -> dict[str, Any]:
    """All scores of one condition, each with the confidence interval of its mean."""
    words = np.array([word_score(text.text, study.found.words) for text in texts], dtype=float)
    per_text = {
        "words": words,
        "judge": study.judge([text.text for text in texts]),
        "logprob": np.array([values.mean() for values in study.likelihood(texts, unembedding)]),
        "distinct2": np.array([varied(text.token_ids) for text in texts]),
    }
    return {
        **{
            name: {"mean": float(values.mean()), "interval": interval(values)}
            for name, values in per_text.items()
        },
        "positive_texts": float((words > 0).mean()),
        "negative_texts": float((words < 0).mean()),
        "texts": [text.text for text in texts],
    }


def accuracy(study: Study) -> float:
    """Accuracy of the judge on the contrasted texts, with the median as threshold, because its
    shots bias it in one direction.
    """
    margins = study.judge([*study.found.positive, *study.found.negative])
    positive = np.arange(len(margins)) < len(study.found.positive)
    return float(((margins > np.median(margins)) == positive).mean())


def _with_interval(score: dict[str, Any]) -> str:
    low, high = score["interval"]
    return f"{score['mean']:+.2f} [{low:+.2f}, {high:+.2f}]"


def table(conditions: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| scale | word score | judge, nats | texts + / − | log-prob per token | distinct-2 |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in conditions.items():
        cells = [
            name,
            _with_interval(found["words"]),
            _with_interval(found["judge"]),
            f"{found['positive_texts']:.0%} / {found['negative_texts']:.0%}",
            f"{found['logprob']['mean']:.2f}",
            f"{found['distinct2']['mean']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def samples(conditions: dict[str, dict[str, Any]], prompts: list[str]) -> str:
    lines = []
    for number in (number for number in SHOWN if number < len(prompts)):
        lines += [f"**{prompts[number]}** …", "", "| scale | |", "|---|---|"]
        lines += [
            f"| {name} | {_one_line(found['texts'][number])} |"
            for name, found in conditions.items()
        ]
        lines.append("")
    return "\n".join(lines)


def draw(
    path: Path,
    scales: dict[float, dict[str, Any]],
    controls: list[dict[str, Any]],
    layers: dict[int, tuple[float, float]],
    chosen: int,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (effect, price, where) = pyplot.subplots(
        1, 3, figsize=(12, 3.4), constrained_layout=True
    )
    at = list(scales)
    for axis, key, colour, label in (
        (effect, "words", "tab:blue", "word score"),
        (price, "logprob", "tab:red", "log-prob per token"),
    ):
        means = [found[key]["mean"] for found in scales.values()]
        low, high = zip(*(found[key]["interval"] for found in scales.values()), strict=True)
        axis.plot(at, means, "o-", color=colour)
        axis.fill_between(at, low, high, color=colour, alpha=0.2)
        random = [found[key]["mean"] for found in controls]
        axis.plot(
            [CONTROL_SCALE] * len(random), random, "x", color="grey", label="random directions"
        )
        axis.set(xlabel=f"scale of the direction (layer {chosen})", ylabel=label)
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    effect.set_title("Sentiment of 100 continuations")
    price.set_title("Likelihood without steering")
    where.plot(
        list(layers),
        [high for _, high in layers.values()],
        "o-",
        color="tab:green",
        label=f"+{SWEEP_SCALE:g}",
    )
    where.plot(
        list(layers),
        [low for low, _ in layers.values()],
        "o-",
        color="tab:purple",
        label=f"−{SWEEP_SCALE:g}",
    )
    where.axvline(chosen, color="grey", linestyle=":")
    where.set(xlabel="steered layer", ylabel="word score", title="Sweep over layers")
    where.legend(frameon=False)
    where.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8321")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--out", type=Path, default=Path("sentiment-study"))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    options = parser.parse_args()
    began = time.monotonic()
    found = materials()
    prompts = found.prompts[:: max(1, len(found.prompts) // options.prompts)][: options.prompts]
    unembedding = Unembedding(options.checkpoint)
    with Client(options.url) as client:
        study = Study(client, client.models()[0], found, options.temperature)
        directions, lengths = study.directions()
        layers = sweep(study, directions, list(range(1, len(directions), 2)))
        chosen = max(layers, key=lambda layer: layers[layer][1] - layers[layer][0])
        direction, norm = directions[chosen], float(np.linalg.norm(directions[chosen]))
        print(
            (
                f"layer {chosen}: the direction is {norm:.1f} long, the stream of a text "
                f"{lengths[chosen]:.0f}\n"
            ),
            flush=True,
        )
        print("| layer | " + " | ".join(map(str, layers)) + " |\n|---" + "|---" * len(layers) + "|")
        for row, sign in enumerate("−+"):
            print(
                f"| {sign}{SWEEP_SCALE:g} | "
                + " | ".join(f"{ends[row]:+.2f}" for ends in layers.values())
                + " |"
            )
        plain = study.write(prompts)
        recomputed = study.likelihood(plain, unembedding)
        off = max(
            abs(np.array(text.logprobs) - values).mean()
            for text, values in zip(plain, recomputed, strict=True)
        )
        judged = accuracy(study)
        print(
            f"\nthe judge is right about {judged:.0%} of the {2 * len(found.positive)} "
            f"contrasted texts; {len(found.words)} words"
        )
        print(
            (
                f"log-probabilities out of captures are {off:.3f} from the server's own (the "
                "worst text's mean)\n"
            ),
            flush=True,
        )
        scales = {
            scale: measure(
                study,
                study.write(prompts, chosen, direction, scale) if scale else plain,
                unembedding,
            )
            for scale in SCALES
        }
        rng = np.random.default_rng(0)
        random = [
            vector / np.linalg.norm(vector) * norm
            for vector in rng.standard_normal((CONTROLS, len(direction)))
        ]
        controls = [
            measure(study, study.write(prompts, chosen, vector, CONTROL_SCALE), unembedding)
            for vector in random
        ]
    conditions = {f"{scale:+g}" if scale else "0": one for scale, one in scales.items()}
    both = conditions | {
        f"random {number}, {CONTROL_SCALE:+g}": one for number, one in enumerate(controls, 1)
    }
    print(table(both), samples(conditions, prompts), sep="\n\n")
    options.out.mkdir(parents=True, exist_ok=True)
    draw(options.out / "sentiment.png", scales, controls, layers, chosen)
    np.save(options.out / "sentiment.npy", direction)
    report = {
        "layer": chosen,
        "norm": norm,
        "sweep": layers,
        "judge_accuracy": judged,
        "prompts": prompts,
        "conditions": both,
    }
    (options.out / "results.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))
    print(
        f"{time.monotonic() - began:.0f} s; in {options.out}: results.json, "
        "sentiment.png, sentiment.npy (the direction)"
    )


if __name__ == "__main__":
    main()
