"""Trains a small sparse autoencoder on activations of the demo model, and saves it as SAELens does: the one of `docs/features.md`.

    midstream up --set sae_dir=.midstream/saes &
    python examples/train_sae.py --out .midstream/saes/smollm2-15

1. The model continues some hundred prompts, several times each, with sampling; its rows at one layer are captured at every token.
2. A BatchTopK autoencoder (Bussmann et al. 2024, arXiv:2412.06410) is trained on them with Adam, in numpy. Of each batch, the largest
   activations stay, `--active` for each row on average. Decoder rows have length 1. Features that are never active get the direction of
   a badly reconstructed row.
3. For inference it is JumpReLU, as in sae-lens: the threshold is the mean of the smallest activations that stayed in a batch.

The first token of a text is left out: it is an attention sink, a hundred times larger than the others, and says nothing of the text.
Texts that end up in the last tenth are not trained on. Prints what the autoencoder explains of them, and what its features stand for.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from midstream import CaptureReader, Client

DATA = Path(__file__).with_name("data") / "sentiment.json"
SINK = 1
BATCH, RATE, BETAS = 512, 1e-3, (0.9, 0.999)
#: Steps after which features that were not active are re-initialised; none of them in the last third.
REVIVED_EVERY = 200
#: Steps at the end over which the threshold is found.
LAST = 200


@dataclass
class Texts:
    """Rows `[tokens, hidden]` of all texts, and around each token the words before it."""

    rows: np.ndarray
    tokens: list[str]
    contexts: list[str]
    of: np.ndarray  # number of its text


def prompts() -> list[str]:
    raw = json.loads(DATA.read_text())
    sentences = [text for pair in (*raw["pairs"], *raw["held_out_pairs"]) for text in pair]
    return sentences + [frame.format(topic) for topic in (*raw["topics"], *raw["sweep_topics"]) for frame in raw["frames"]]


def capture(client: Client, layer: int, rounds: int, tokens: int) -> Texts:
    """Rows at `post_block` of what the model says after each prompt, and of the prompts."""
    model = client.models()[0]
    rows: list[np.ndarray] = []
    words: list[str] = []
    contexts: list[str] = []
    of: list[int] = []
    for number in range(rounds):
        asked = prompts()
        sampling = {"max_tokens": tokens, "temperature": 1.0, "seed": number}
        result = client.run(model=model, prompts=asked, sampling=sampling, capture={"layers": layer, "positions": "all"})
        reader: CaptureReader = client.capture(result)
        for request in reader.requests():
            found, said = reader.array(layer, request=request), reader.tokens(request)
            rows.append(found[SINK:])
            words += said[SINK:]
            contexts += ["".join(said[max(0, place - 6) : place]) for place in range(SINK, len(said))]
            of += [number * len(asked) + request] * (len(said) - SINK)
        print(f"round {number + 1} of {rounds}: {len(words)} tokens")
    return Texts(np.concatenate(rows).astype(np.float32), words, contexts, np.array(of))


@dataclass
class Adam:
    """Kingma and Ba 2014, arXiv:1412.6980."""

    tensors: dict[str, np.ndarray]
    steps: int = 0
    first: dict[str, np.ndarray] = field(default_factory=dict)
    second: dict[str, np.ndarray] = field(default_factory=dict)

    def step(self, slopes: dict[str, np.ndarray], rate: float) -> None:
        self.steps += 1
        for name, slope in slopes.items():
            first = self.first.setdefault(name, np.zeros_like(slope))
            second = self.second.setdefault(name, np.zeros_like(slope))
            first += (1 - BETAS[0]) * (slope - first)
            second += (1 - BETAS[1]) * (slope * slope - second)
            scale = rate * np.sqrt(1 - BETAS[1] ** self.steps) / (1 - BETAS[0] ** self.steps)
            self.tensors[name] -= scale * first / (np.sqrt(second) + 1e-8)


def batches(rows: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        order = rng.permutation(len(rows))
        yield from (rows[order[start : start + BATCH]] for start in range(0, len(rows) - BATCH + 1, BATCH))


def unit(rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def encoded(tensors: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Before any feature is left out, `[n, d_sae]`, 0 or more."""
    return np.maximum((rows - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"], 0)


def train(rows: np.ndarray, features: int, active: int, steps: int) -> tuple[dict[str, np.ndarray], float]:
    """Tensors of sae-lens' names, and the threshold, for rows whose mean square is 1."""
    rng = np.random.default_rng(0)
    width = rows.shape[1]
    decoder = unit(rng.standard_normal((features, width))).astype(np.float32)
    tensors = {"W_enc": decoder.T.copy(), "W_dec": decoder, "b_enc": np.zeros(features, np.float32), "b_dec": rows.mean(0)}
    adam, thresholds, used = Adam(tensors), [], np.zeros(features, bool)
    for step, batch in zip(range(steps), batches(rows, rng), strict=False):
        centred = batch - tensors["b_dec"]
        values = encoded(tensors, batch)
        least = np.partition(values, -active * BATCH, axis=None)[-active * BATCH]
        values *= values >= max(least, 1e-6)
        off = values @ tensors["W_dec"] + tensors["b_dec"] - batch
        slope = 2 / BATCH * off
        inner = (slope @ tensors["W_dec"].T) * (values > 0)
        slopes = {
            "W_dec": values.T @ slope, "b_dec": slope.sum(0) - (inner @ tensors["W_enc"].T).sum(0),
            "W_enc": centred.T @ inner, "b_enc": inner.sum(0),
        }  # fmt: skip
        adam.step(slopes, RATE * min(1.0, 5 * (steps - step) / steps))
        tensors["W_dec"][:] = unit(tensors["W_dec"])
        used |= (values > 0).any(0)
        if step >= steps - LAST:
            thresholds.append(float(values[values > 0].min()))
        if (step + 1) % REVIVED_EVERY == 0:
            dead = np.flatnonzero(~used)
            explained = 1 - float((off**2).sum() / (centred**2).sum())
            print(f"step {step + 1}: {explained:.1%} of the variance explained, {len(dead)} features not active lately")
            if step < 2 * steps / 3 and len(dead):
                worst = np.argsort(-(off**2).sum(1))[: len(dead)]
                dead = dead[: len(worst)]
                tensors["W_dec"][dead] = unit(-off[worst])
                tensors["W_enc"][:, dead] = tensors["W_dec"][dead].T
                tensors["b_enc"][dead] = 0
            used[:] = False
    return tensors, float(np.mean(thresholds))


def save(folder: Path, tensors: dict[str, np.ndarray], threshold: float, scale: float, layer: int, model: str) -> dict[str, np.ndarray]:
    """In SAELens' format, for rows as they are; weights are rounded to float16. What was saved, in float32."""
    saved = {
        "W_enc": tensors["W_enc"] * scale, "W_dec": tensors["W_dec"] / scale, "b_enc": tensors["b_enc"], "b_dec": tensors["b_dec"] / scale,
        "threshold": np.full(len(tensors["b_enc"]), threshold, np.float32),
    }  # fmt: skip
    saved = {name: np.ascontiguousarray(tensor, dtype=np.float16) for name, tensor in saved.items()}
    width, features = saved["W_enc"].shape
    config = {
        "architecture": "jumprelu", "d_in": width, "d_sae": features, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": True,
        "normalize_activations": "none", "reshape_activations": "none",
        "metadata": {"hook_name": f"blocks.{layer}.hook_resid_post", "model_name": model, "prepend_bos": False},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(saved, folder / "sae_weights.safetensors")
    return {name: tensor.astype(np.float32) for name, tensor in saved.items()}


def activations(saved: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    found = encoded(saved, rows)
    return found * (found > saved["threshold"])


def report(saved: dict[str, np.ndarray], texts: Texts, held: np.ndarray, shown: int) -> None:
    rows = texts.rows[held]
    values = activations(saved, rows)
    off = rows - values @ saved["W_dec"] - saved["b_dec"]
    explained = 1 - float((off**2).sum() / ((rows - rows.mean(0)) ** 2).sum())
    active = f"{(values > 0).sum(1).mean():.1f} of {values.shape[1]} features for each token, {(values > 0).any(0).sum()} on some token"
    print(f"\n{len(rows)} tokens of texts that were not trained on: {explained:.1%} of the variance explained; active: {active}\n")
    everywhere = activations(saved, texts.rows)
    print("| feature | active | largest | where it is most active |\n|---|---|---|---|")
    share = (everywhere > 0).mean(0)
    usual = np.flatnonzero((share > 0.002) & (share < 0.02))
    sharp = sorted(usual, key=lambda feature: -_agreement(everywhere[:, feature], texts))
    for feature in sharp[:shown]:
        order = np.argsort(-everywhere[:, feature])[:200]
        seen: dict[int, int] = {}
        for place in order:
            seen.setdefault(int(texts.of[place]), int(place))
        where = "; ".join(f"{texts.contexts[place]}**{texts.tokens[place]}**".replace("\n", "⏎") for place in list(seen.values())[:4])
        print(f"| {feature} | {share[feature]:.1%} | {everywhere[:, feature].max():.1f} | {where} |")


def _agreement(values: np.ndarray, texts: Texts) -> float:
    """The share of the commonest token among those where a feature is most active, of texts that differ."""
    found: dict[int, str] = {}
    for place in np.argsort(-values)[:60]:
        found.setdefault(int(texts.of[place]), texts.tokens[place].strip().lower())
    words = list(found.values())[:20]
    return max(words.count(word) for word in set(words)) / max(len(words), 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of the API; by default that of the running stack")
    parser.add_argument("--out", type=Path, default=Path("sae"), help="folder of the autoencoder")
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--active", type=int, default=24, help="features for each token, on average")
    parser.add_argument("--rounds", type=int, default=3, help="continuations of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--shown", type=int, default=20, help="features in the table")
    asked = parser.parse_args()

    began = time.monotonic()
    with Client(asked.url) as client:
        model = client.models()[0]
        texts = capture(client, asked.layer, asked.rounds, asked.tokens)
    print(f"captured in {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    held = texts.of % 10 == 9  # of every prompt that is the tenth, all continuations
    known = texts.rows[~held]
    scale = float(1 / np.sqrt(((known - known.mean(0)) ** 2).sum(1).mean()))
    tensors, threshold = train(known * scale, asked.features, asked.active, asked.steps)
    saved = save(asked.out, tensors, threshold, scale, asked.layer, model)
    print(f"trained in {time.monotonic() - began:.0f} s; saved in {asked.out}")
    report(saved, texts, held, asked.shown)


if __name__ == "__main__":
    main()
