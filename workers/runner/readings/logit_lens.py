"""The logit lens on a rank: applies the model's final norm and output matrix to captured rows, and
returns this rank's part of the top tokens and log-probabilities.

nostalgebraist 2020, "interpreting GPT: the logit lens". Log-softmax is computed in float32.
"""

from collections.abc import Callable

import torch

from ....schemas.readings.lens import LensPart, StoredLens
from ..files.finished_rows import FinishedCapture
from ..hooks.output_head import OutputHead
from .readings import array, own_stream, rows_of
from .tuned_lenses import TunedMaps

#: Bytes of float32 logits at a time: rows are read in chunks of about this size.
CHUNK_BYTES = 32 << 20


class LensReader:
    """The reader of `StoredLens`. One per rank; keeps no state between calls."""

    def __init__(
        self,
        head: OutputHead,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        tuned: TunedMaps | None = None,
    ) -> None:
        """`reduce` sums over all ranks of the stage. `tuned`: the maps of tuned lenses; None: tuned
        lenses are not served.
        """
        self.head = head
        self._reduce = reduce
        self._tuned = tuned or TunedMaps("")

    def prepare(self, reading: StoredLens) -> OutputHead | None:
        """Return a head for the named tokens if ranks share the vocabulary, so that each rank can
        count its tokens with larger logits; else None.
        """
        return (
            self.head.for_tokens(reading.tokens, self._reduce)
            if reading.tokens and self.head.shard.count > 1
            else None
        )

    def __call__(self, capture: FinishedCapture, number: int) -> LensPart:
        """Read every row of the capture. `number`: index of the capture in the request."""
        reading = capture.capture.reading
        assert isinstance(reading, StoredLens)
        ((hook, layers),) = capture.capture.sites.items()
        shard = self.head.shard
        of_named: OutputHead | None = capture.prepared
        with self._tuned.of(reading.tuned) as tuned, own_stream(self.head.device):
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
        self, rows: torch.Tensor, stored_lens: StoredLens, of_named: OutputHead | None
    ) -> list[torch.Tensor]:
        """Read rows `[positions, hidden]`; return top ids and logits `[positions, k]`, log-sum-exp
        `[positions]`, and `[positions, named]`: the named tokens' logits, and how many are larger.
        """
        size = max(1, CHUNK_BYTES // (4 * (self.head.shard.stop - self.head.shard.start)))
        parts = [self._of(chunk, stored_lens, of_named) for chunk in rows.split(size)]
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def _of(
        self, rows: torch.Tensor, stored_lens: StoredLens, of_named: OutputHead | None
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
