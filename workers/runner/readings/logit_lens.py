"""The logit lens on a rank: captured rows through the model's final norm and output matrix, as top
tokens and log-probabilities.

nostalgebraist 2020, "interpreting GPT: the logit lens". Log-softmax is taken in float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....schemas.readings.lens import LensPart, StoredLens
from ..files.finished_rows import FinishedCapture
from ..hooks.output_head import Head
from .readings import array, rows_of
from .tuned_lenses import TunedMaps

#: Logits that are held at a time, float32: rows are taken in chunks of about this many bytes.
CHUNK_BYTES = 32 << 20


class Lens:
    """The reader of `StoredLens`. One per rank; holds nothing between calls."""

    def __init__(
        self,
        head: Head,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        tuned: TunedMaps | None = None,
    ) -> None:
        """`reduce`: the sum over all ranks of the stage.

        `tuned`: the maps of tuned lenses; None: none are served.
        """
        self.head, self._reduce, self._tuned = head, reduce, tuned or TunedMaps("")

    def prepare(self, reading: StoredLens) -> Head | None:
        """The output matrix of the named tokens, where other ranks have some of it: so each can
        count what is above them.
        """
        return (
            self.head.rows_of(reading.tokens, self._reduce)
            if reading.tokens and self.head.shard.count > 1
            else None
        )

    def __call__(self, capture: FinishedCapture, number: int) -> LensPart:
        """Reads every row of the capture. `number`: its place among the request's captures."""
        reading = capture.capture.reading
        assert isinstance(reading, StoredLens)
        ((hook, layers),) = capture.capture.sites.items()
        shard = self.head.shard
        of_named: Head | None = capture.prepared
        with self._tuned.of(reading.tuned) as tuned, _beside(self.head.device):
            read = [
                self._read(
                    tuned(rows_of(capture, hook, layer, self.head.device), layer), reading, of_named
                )
                for layer in layers
            ]
            ids, logits, total, named, above = (
                torch.stack(values).cpu() for values in zip(*read, strict=True)
            )
        return LensPart(
            capture=number,
            shard=shard.number,
            shards=shard.count,
            hook=hook,
            layers=layers,
            positions=capture.positions,
            token_ids=capture.token_ids,
            named=reading.tokens,
            top=array(ids, torch.int32),
            logits=array(logits, torch.float32),
            total=array(total, torch.float32),
            named_logits=array(named, torch.float32),
            above=array(above, torch.int32),
        )

    def _read(
        self, rows: torch.Tensor, stored_lens: StoredLens, of_named: Head | None
    ) -> list[torch.Tensor]:
        """Read `[positions, hidden]`: top ids and logits `[positions, k]`, log-sum-exp
        `[positions]`, named logits and counts above.
        """
        width = self.head.shard.stop - self.head.shard.start
        size = max(1, CHUNK_BYTES // (4 * width))
        parts = (
            [self._of(chunk, stored_lens, of_named) for chunk in rows.split(size)]
            if len(rows)
            else [self._of(rows, stored_lens, of_named)]
        )
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def _of(
        self, rows: torch.Tensor, stored_lens: StoredLens, of_named: Head | None
    ) -> tuple[torch.Tensor, ...]:
        shard = self.head.shard
        normed = self.head.norm(rows.to(self.head.dtype))
        logits = self.head.logits(normed)
        top, ids = logits.topk(min(stored_lens.top_k, logits.shape[1]), dim=-1)
        places = (
            torch.tensor(stored_lens.tokens, dtype=torch.int64, device=logits.device) - shard.start
        )
        named = logits[:, places] if of_named is None else of_named.logits(normed)
        above = torch.empty(named.shape, dtype=torch.int64, device=logits.device)
        for number, place in enumerate(places.tolist()):
            larger = logits > named[:, [number]]
            if 0 <= place < logits.shape[1]:
                larger[:, place] = False
            above[:, number] = larger.sum(dim=-1)
        return ids + shard.start, top, logits.logsumexp(dim=-1), named, above


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """On an accelerator its own stream: the forward pass does not wait for what is read."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
