"""Measures the error of sketched Jacobian lenses against the exact one, by rank, and their time.

    python benchmarks/jacobian.py --model FOLDER --corpus FILE

FILE: text, cut into prompts of `--tokens` tokens. Prints, for each rank and layer, the relative
error in the Frobenius norm, the error that the fit states from its held-out vectors, and the median
cosine between directions Jᵀ W_U[t] of random tokens.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, JacobianRecord
from midstream.workers.gradients.jacobian import fit_jacobian_lens, fit_memory
from midstream.workers.gradients.points import Points

DIRECTIONS = 256


def fitted(
    model: Any, prompts: list[list[int]], options: argparse.Namespace, rank: int | None
) -> tuple[dict[int, torch.Tensor], JacobianRecord, float]:
    fit = JacobianFit(rank=rank, skip_first=options.skip_first, max_tokens=options.tokens)
    began = time.perf_counter()
    jacobians, record = fit_jacobian_lens(Points(model), prompts, options.layers, fit)
    return jacobians, record, time.perf_counter() - began


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--skip-first", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs="+", default=[15, 25])
    parser.add_argument("--ranks", type=int, nargs="+", default=[36, 72, 144, 288])
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(options.model)(options.corpus.read_text())["input_ids"]
    prompts = [ids[n : n + options.tokens] for n in range(0, len(ids), options.tokens)]
    prompts = prompts[: options.prompts]
    head = model.get_output_embeddings().weight.detach().float()
    chosen = head[
        torch.randint(len(head), (DIRECTIONS,), generator=torch.Generator().manual_seed(3))
    ]
    exact, _, seconds = fitted(model, prompts, options, None)
    width = head.shape[1]
    print(
        f"{options.model.name}, width {width}, {len(prompts)} prompts of {options.tokens} tokens, "
        f"{torch.get_num_threads()} threads; sums {fit_memory(len(exact), width) / 2**20:.1f} MiB; "
        f"exact: {seconds / len(prompts):.1f} s a prompt"
    )
    print("| rank | of the width | layer | error | stated | cosine of directions | s a prompt |")
    print("|---|---|---|---|---|---|---|")
    for rank in options.ranks:
        found, record, seconds = fitted(model, prompts, options, rank)
        for (layer, matrix), stated in zip(found.items(), record.errors, strict=True):
            error = float((matrix - exact[layer]).norm() / exact[layer].norm())
            cosine = torch.cosine_similarity(chosen @ matrix, chosen @ exact[layer]).median()
            print(
                f"| {rank} | {rank / width:.1%} | {layer} | {error:.3f} | {stated:.3f} | "
                f"{cosine:.3f} | {seconds / len(prompts):.1f} |"
            )


if __name__ == "__main__":
    main()
