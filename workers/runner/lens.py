"""The logit lens on a rank: captured rows through the model's final norm and output matrix, as top tokens and log-probabilities.

nostalgebraist 2020, "interpreting GPT: the logit lens". Log-softmax is taken in float32.
"""

import torch

from ...schemas.readings import LensPart, StoredLens
from .finished import FinishedCapture
from .head import Head
from .readings import array, rows_of

#: Logits that are held at a time, float32: rows are taken in chunks of about this many bytes.
CHUNK_BYTES = 32 << 20


class Lens:
    """The reader of `StoredLens`. One per rank; holds nothing between calls."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def __call__(self, capture: FinishedCapture, number: int) -> LensPart:
        """Reads every row of the capture. `number`: its place among the request's captures."""
        wanted = capture.capture.reading
        assert isinstance(wanted, StoredLens)
        ((hook, layers),) = capture.capture.sites.items()
        shard = self._head.shard
        read = [self._read(rows_of(capture, hook, layer, self._head.device), wanted) for layer in layers]
        ids, logits, total, named, above = (torch.stack(values) for values in zip(*read, strict=True))
        return LensPart(
            capture=number,
            shard=shard.number,
            shards=shard.count,
            hook=hook,
            layers=layers,
            positions=capture.positions,
            token_ids=capture.token_ids,
            named=wanted.tokens,
            top=array(ids, torch.int32),
            logits=array(logits, torch.float32),
            total=array(total, torch.float32),
            named_logits=array(named, torch.float32),
            above=array(above, torch.int32),
        )

    def _read(self, rows: torch.Tensor, wanted: StoredLens) -> list[torch.Tensor]:
        """Of `[positions, hidden]`: top ids and logits `[positions, k]`, log-sum-exp `[positions]`, named logits and counts above."""
        width = self._head.shard.stop - self._head.shard.start
        size = max(1, CHUNK_BYTES // (4 * width))
        parts = [self._of(chunk, wanted) for chunk in rows.split(size)] if len(rows) else [self._of(rows, wanted)]
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def _of(self, rows: torch.Tensor, wanted: StoredLens) -> tuple[torch.Tensor, ...]:
        shard = self._head.shard
        logits = self._head.logits(self._head.norm(rows.to(self._head.dtype)))
        top, ids = logits.topk(min(wanted.top_k, logits.shape[1]), dim=-1)
        tokens = torch.tensor(wanted.tokens, dtype=torch.int64, device=logits.device)
        named = logits[:, tokens]
        above = torch.stack([(logits > named[:, [place]]).sum(dim=-1) for place in range(len(tokens))], dim=-1) if len(tokens) else named
        return ids + shard.start, top, logits.logsumexp(dim=-1), named, above
