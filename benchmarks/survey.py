"""Rows per second of a survey's pass: encoding alone, and with the strongest examples kept.

Random rows of documents of 200 tokens; random standard autoencoders in which about 1 % of the
features are active.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from midstream.schemas.artifacts.saes import SaeForm
from midstream.workers.runner.readings.sae import Autoencoder
from midstream.workers.surveys.rows import Block
from midstream.workers.surveys.survey import featured

DOCUMENT = 200


def autoencoder(width: int, features: int) -> Autoencoder:
    rng = torch.Generator().manual_seed(0)
    encoder = torch.randn(width, features, generator=rng) / width**0.5
    tensors = {"W_enc": encoder, "W_dec": encoder.T.contiguous()}
    tensors |= {"b_enc": torch.full((features,), -2.33), "b_dec": torch.zeros(width)}
    return Autoencoder(SaeForm(architecture="standard", d_in=width, d_sae=features), tensors)


def documents(rows: int, width: int) -> Iterator[Block]:
    rng = np.random.default_rng(1)
    for start in range(0, rows, DOCUMENT):
        numbers = np.arange(start, min(rows, start + DOCUMENT))
        values = rng.standard_normal((len(numbers), width), np.float32)
        yield Block(numbers // DOCUMENT, numbers % DOCUMENT, numbers % 50_000, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--context", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print("| width | features | encoding alone, rows/s | the survey, rows/s |\n|---|---|---|---|")
    for width, features in ((576, 400), (576, 16_384), (2304, 16_384)):
        sae, best = autoencoder(width, features), [float("inf")] * 2
        for _ in range(asked.rounds):
            parts = list(documents(asked.rows, width))
            began = time.perf_counter()
            for part in parts:
                sae.encode(torch.from_numpy(part.values))
            middle = time.perf_counter()
            featured(sae, parts, asked.top, asked.context)
            seconds = middle - began, time.perf_counter() - middle
            best = list(map(min, best, seconds))
        alone, whole = (asked.rows / seconds for seconds in best)
        print(f"| {width} | {features:,} | {alone:,.0f} | {whole:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
