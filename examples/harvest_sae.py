"""Trains a small sparse autoencoder with SAELens on a harvest of the demo model, and shows what its features stand for.

    pip install sae-lens
    midstream up &
    python examples/harvest_sae.py --out sae

1. The paragraphs of a corpus are harvested at one layer: each token's row once, shuffled, in shards.
2. SAELens' `SAETrainer` takes batches from `midstream.harvest.activations`.
3. For three of the features that are active most often, the tokens with the highest activations are shown.

`--lines` takes any file with a document in each line; without it, the corpus is generated.
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import midstream

LAYER, LENGTH = 15, 128


def generated(count: int) -> list[str]:
    """Sentences about arithmetic, colours and places."""
    numbers = itertools.product(range(2, 40), range(2, 40))
    sums = [f"{first} plus {second} is {first + second}. {first} times {second} is {first * second}." for first, second in numbers]
    things = itertools.product(("sky", "grass", "snow", "coal", "blood", "sea"), ("blue", "green", "white", "black", "red"))
    colours = [f"The {thing} is {colour}. A {colour} {thing} is what the painter wanted." for thing, colour in things]
    places = [f"{city} is the capital of {land}." for city, land in (("Paris", "France"), ("Rome", "Italy"), ("Oslo", "Norway"))]
    return [*sums, *colours, *places][:count]


def train(uri: str, layer: int, width: int, active: int, samples: int, out: Path) -> Any:
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    d_in = midstream.harvest.open(uri).manifest.widths["post_block"]
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=d_in, d_sae=width, k=active, device="cpu"))
    batch = 512
    config = SAETrainerConfig(total_training_samples=samples, train_batch_size_samples=batch, lr=1e-3, n_batches_for_norm_estimate=10)
    data = midstream.harvest.activations(uri, layer, batch_size=batch)
    trained = SAETrainer(cfg=config, sae=sae, data_provider=data).fit()
    trained.save_inference_model(str(out))
    return trained


def top_tokens(client: midstream.Client, model: str, uri: str, layer: int, sae: Any, features: int, shown: int) -> dict[int, list[str]]:
    """Feature → the tokens at which it is most active, for those that are active most often, but not nearly always."""
    import torch

    made = midstream.harvest.open(uri)
    with torch.no_grad():
        found = sae.encode(torch.from_numpy(made.rows(slice(None), layer))).numpy()
    share = (found > 0).mean(axis=0)
    chosen = np.argsort(np.where(share < 0.2, -share, 0))[:features]
    tokens = made.keys(slice(None)).token_ids
    best = {int(feature): tokens[np.argsort(-found[:, feature])[: 20 * shown]].tolist() for feature in chosen}
    return {
        feature: [word for word, _ in Counter(client.detokenize(model, ids).token_strs).most_common(shown)] for feature, ids in best.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--active", type=int, default=16)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path("sae"))
    asked = parser.parse_args()
    lines = asked.lines.read_text().splitlines() if asked.lines else generated(asked.documents)
    with midstream.Client() as client:
        model = client.models()[0]
        positions = {"skip_first": 1}  # an attention sink, a hundred times larger than the others
        view = client.submit_harvest(
            model=model, source={"lines": lines[: asked.documents]}, layers=[LAYER], cut={"max_length": LENGTH}, positions=positions
        )
        view = client.wait_harvest(view)
        print(f"{view.rows} rows in {view.shards} shards at {view.uri}")
        sae = train(view.uri, LAYER, asked.width, asked.active, asked.samples, asked.out)
        for feature, words in top_tokens(client, model, view.uri, LAYER, sae, 3, 8).items():
            print(f"feature {feature}: {' '.join(map(repr, words))}")


if __name__ == "__main__":
    main()
