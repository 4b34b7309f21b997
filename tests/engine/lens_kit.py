"""Logit lenses of tests: as the API stores them, joined as results are, and transformers' own."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from host import Host

from midstream.broker.ledger.results.readings import readings
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.readings.lens import LensReading, StoredLens
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import StoredCapture

#: Of log-probabilities, nats, in fp32: what the product with the output matrix in another batch
#: differs by.
LENS_NATS = 1e-4


def lens(
    layers: list[int],
    positions: Any = "all_prompt",
    *,
    top_k: int = 5,
    tokens: tuple[int, ...] = (),
    **options: Any,
) -> StoredCapture:
    sites = options.pop("sites", {"post_block": layers})
    reading = StoredLens(top_k=top_k, tokens=list(tokens), tuned=options.pop("tuned", None))
    return StoredCapture(
        sites=sites, positions=positions, tag="", consumers=[READER], reading=reading, **options
    )


def lenses(host: Host, job: Job) -> list[LensReading]:
    """Of every prompt, once all ranks have reported.

    Raises AssertionError with the reason of one that failed.
    """
    receipts = host.receipts(job)
    for receipt in receipts:
        assert receipt.status == "ok", receipt
    return readings(receipts)["lens"]


class Truth:
    """transformers' model, fp32, and its logits from the stream behind each layer."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """float32 `[layers, tokens, vocabulary]`: hidden states through final norm and output
        matrix; the last are its own.
        """
        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), output_hidden_states=True)
            norm = self.norm()
            rows = [self.head(norm(state[0])) for state in out.hidden_states[1:-1]] + [
                out.logits[0]
            ]
            return torch.stack([row.float().log_softmax(dim=-1) for row in rows]).numpy()

    def norm(self) -> Any:
        inner = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.model
        return next(
            getattr(inner, name)
            for name in ("norm", "ln_f", "final_layer_norm", "norm_f")
            if getattr(inner, name, None) is not None
        )

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        logits = (
            self.model.lm_head(normed)
            if hasattr(self.model, "lm_head")
            else self.model.embed_out(normed)
        )
        config = self.model.config.get_text_config()
        if getattr(config, "logits_scaling", None):
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):
            logits = logits * config.logit_scale
        if getattr(config, "final_logit_softcapping", None):
            logits = (
                torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
            )
        return logits


def check(reading: LensReading, wanted: np.ndarray, nats: float = LENS_NATS) -> None:
    """`wanted`: as `Truth.logprobs` of the prompt and what was generated."""
    top = np.array(reading.top_tokens)
    values = np.array(reading.top_logprobs)
    for i, layer in enumerate(reading.layers):
        for j, position in enumerate(reading.positions):
            truth = wanted[layer, position]
            assert np.abs(truth[top[i, j]] - values[i, j]).max() <= nats, (layer, position)
            assert np.abs(np.sort(truth)[::-1][: top.shape[2]] - values[i, j]).max() <= nats, (
                "others are larger"
            )
            assert (np.diff(values[i, j]) <= 0).all()
            for k, token in enumerate(reading.named_tokens):
                assert abs(truth[token] - reading.named_logprobs[i][j][k]) <= nats, (
                    layer,
                    position,
                    token,
                )
                rank = reading.named_ranks[i][j][k]
                assert (
                    (truth > truth[token] + nats).sum()
                    <= rank
                    <= (truth > truth[token] - nats).sum()
                ), (layer, position, token)
