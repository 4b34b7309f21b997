"""Trains a small sparse autoencoder with SAELens on a harvest of the demo model, registers it, and
shows what its features stand for.

    make sae                                          # installs SAELens in .cache/sae
    midstream up &
    .cache/sae/bin/python examples/train_sae.py --out .midstream/saes/smollm2-15

1. The corpus is what the model says after some hundred prompts. A harvest generates it and keeps
   the rows of one layer, each token's once. The first token of a text is left out: it is an
   attention sink, a hundred times larger than the others.
2. SAELens trains a BatchTopK autoencoder (Bussmann et al. 2024, arXiv:2412.06410) on
   `midstream.harvest.activations`, and saves it as JumpReLU.
3. It is registered: requests may read its features and steer by them from now on
   (docs/read.md).
4. A second harvest, of prompts that were not trained on, says how much of the rows it explains, and
   where features are most active.

`--lines` takes any text file with a document in each line instead of the prompts.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens import SAE, BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer

import midstream

DATA = Path(__file__).with_name("data") / "sentiment.json"
BATCH, HELD_EVERY = 512, 10
#: Tokens before one that is shown, and the texts that are.
BEFORE, SHOWN = 6, 4


def prompts() -> list[str]:
    raw = json.loads(DATA.read_text())
    sentences = [text for pair in (*raw["pairs"], *raw["held_out_pairs"]) for text in pair]
    return sentences + [
        frame.format(topic)
        for topic in (*raw["topics"], *raw["sweep_topics"])
        for frame in raw["frames"]
    ]


def harvested(
    client: midstream.Client, model: str, lines: list[str], asked: argparse.Namespace
) -> midstream.harvest.Harvest:
    """Rows at `post_block` of the documents and of what the model says after them."""
    began = time.monotonic()
    view = client.harvests.submit(
        model=model, source={"lines": lines}, layers=[asked.layer], positions={"skip_first": 1},
        generate={"max_tokens": asked.tokens, "temperature": 1.0},
    )  # fmt: skip
    view = client.harvests.wait(view)
    print(
        f"{view.rows} rows of {view.documents} texts in {time.monotonic() - began:.0f} "
        f"s, at {view.uri}"
    )
    return midstream.harvest.open(view.uri)


def trained(uri: str, model: str, asked: argparse.Namespace) -> SAE[Any]:
    """As it is saved in `asked.out`."""
    began, harvest = time.monotonic(), midstream.harvest.open(uri)
    torch.manual_seed(0)
    config = BatchTopKTrainingSAEConfig(
        d_in=harvest.manifest.widths["post_block"],
        d_sae=asked.features,
        k=asked.active,
        device="cpu",
        normalize_activations="expected_average_only_in",
    )
    config.metadata.hook_name, config.metadata.model_name = (
        f"blocks.{asked.layer}.hook_resid_post",
        model,
    )
    config.metadata.prepend_bos = False
    samples = asked.steps * BATCH
    training = SAETrainerConfig(
        total_training_samples=samples, train_batch_size_samples=BATCH, lr=1e-3, lr_end=1e-4,
        lr_decay_steps=asked.steps // 5, dead_feature_window=200, n_batches_for_norm_estimate=20,
    )  # fmt: skip
    sae = SAETrainer(
        training,
        BatchTopKTrainingSAE(config),
        midstream.harvest.activations(uri, asked.layer, batch_size=BATCH),
    ).fit()
    sae.save_inference_model(asked.out)
    print(f"trained on {samples} rows in {time.monotonic() - began:.0f} s; saved in {asked.out}")
    return SAE.load_from_disk(asked.out)


def explained(sae: SAE[Any], rows: np.ndarray) -> str:
    with torch.no_grad():
        values = sae.encode(torch.from_numpy(rows))
        off = sae.decode(values).numpy() - rows
    share = 1 - float((off**2).sum() / ((rows - rows.mean(0)) ** 2).sum())
    active = (
        f"{float((values > 0).sum(1).float().mean()):.1f} of {values.shape[1]} features "
        "for each token"
    )
    return (
        f"{len(rows)} rows that were not trained on: {share:.1%} of the variance "
        f"explained; active: {active}"
    )


def show(
    client: midstream.Client,
    model: str,
    sae: SAE[Any],
    harvest: midstream.harvest.Harvest,
    features: int,
) -> None:
    """A table of those features whose most active places agree best in their token."""
    keys = harvest.keys(slice(None))
    order = np.lexsort((keys.positions, keys.documents))  # as the texts were
    known, which = np.unique(keys.token_ids[order], return_inverse=True)
    documents, tokens = (
        keys.documents[order],
        np.array(client.detokenize(model, known.tolist()).token_strs)[which].tolist(),
    )
    with torch.no_grad():
        values = sae.encode(torch.from_numpy(harvest.rows(slice(None)))).numpy()[order]
    share = (values > 0).mean(axis=0)
    found = []
    for feature in np.flatnonzero((share > 0) & (share < 0.1)).tolist():
        best = [
            place
            for place in np.argsort(-values[:, feature])[:20].tolist()
            if values[place, feature] > 0
        ]
        agreeing = Counter(tokens[place].strip().lower() for place in best).most_common(1)[0][1]
        found.append((agreeing, feature, best))
    print(
        "\n| feature | active | largest | top tokens | where it is most active "
        "|\n|---|---|---|---|---|"
    )
    for _, feature, best in sorted(found, reverse=True)[:features]:
        words = " ".join(
            f"`{word}`"
            for word, _ in Counter(tokens[place].strip() for place in best).most_common(3)
        )
        where = "; ".join(
            list(dict.fromkeys(context(tokens, documents, place) for place in best))[:SHOWN]
        )
        print(
            f"| {feature} | {share[feature]:.1%} | {values[:, feature].max():.1f} | {words} "
            f"| {where} |"
        )


def context(tokens: list[str], documents: np.ndarray, place: int) -> str:
    """The token in bold behind those before it."""
    before = "".join(
        tokens[at]
        for at in range(max(0, place - BEFORE), place)
        if documents[at] == documents[place]
    )
    token = tokens[place].lstrip()
    return (
        f"{before}{tokens[place][: len(tokens[place]) - len(token)]}**{token or ' '}**".strip()
        .replace("\n", "⏎")
        .replace("|", "¦")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".midstream/saes/smollm2-15"),
        help="a folder below the server's artifacts_dir/saes",
    )
    parser.add_argument("--name", default="words", help="that it is registered under")
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3, help="continuations of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of each continuation")
    parser.add_argument("--features", type=int, default=400)
    parser.add_argument(
        "--active", type=int, default=16, help="features for each token, on average"
    )
    parser.add_argument("--steps", type=int, default=1500, help=f"of {BATCH} rows each")
    parser.add_argument("--shown", type=int, default=3, help="features in the table")
    asked = parser.parse_args()
    lines = asked.lines.read_text().splitlines() if asked.lines else prompts()
    held = lines[::HELD_EVERY]
    known = [line for number, line in enumerate(lines) if number % HELD_EVERY] * asked.rounds
    with midstream.Client() as client:
        model = client.models()[0]
        corpus = harvested(client, model, known, asked)
        sae = trained(corpus.store.uri, model, asked)
        registered = client.saes.put(asked.name, asked.out.name)
        print(
            f"registered as {registered.name}: {registered.form.d_sae} features of "
            f"{registered.hook} at layer {registered.layer}"
        )
        print(explained(sae, harvested(client, model, held, asked).rows(slice(None))))
        show(client, model, sae, corpus, asked.shown)


if __name__ == "__main__":
    main()
