"""News of probes: what a step's scores mean for requests, sent with the step's output to the
scheduler and the worker.

The last stage's first rank attaches it. A rank scores all rows of a step, including rows of drafts
that are rejected later and of tokens after an end that it does not know yet. The scheduler knows
which tokens were kept, and only their rows count.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

#: Attribute of a step's output.
NEWS = "midstream_probe_news"
#: Key in the `kv_transfer_params` that vLLM passes from scheduler to worker with a request's
#: tokens: their scores.
SCORES = "midstream_scores"
#: Another: the probe that ended the request. (vLLM's `stop_reason` cannot name it: that may be a
#: user's stop string, which is any text.)
STOPPED_BY = "midstream_stopped_by"


class Scored(NamedTuple):
    """The scores of one token."""

    position: int
    scores: list[float]  # of all labels of the request's probes, probe after probe
    aggregates: list[float]


class News(NamedTuple):
    """News of one request in one step."""

    request_id: str
    stop_at: int  # first position at which a stopping probe reaches its threshold; -1: none
    stopped_by: str  # the probe's name
    scored: list[Scored]  # scores to stream


def news_of(output: Any) -> Sequence[News]:
    """Return the news that are attached to a step's output."""
    return getattr(output, NEWS, ())


class ProbeNews:
    """News of live requests, held until it is known which tokens are kept; one per scheduler."""

    def __init__(self) -> None:
        self._stops: dict[str, tuple[int, str]] = {}
        self._scored: dict[str, list[Scored]] = {}
        self._ended: dict[str, str] = {}  # request → the probe that ended it
        self._over: list[str] = []  # finished requests, forgotten in the next step
        # request → the first position whose row does not count in this step
        self._limits: dict[str, int] = {}

    def hear(self, news: Sequence[News]) -> None:
        """Begin a step with the news of its output; forget requests that ended before."""
        self._limits.clear()
        for new in news:
            if new.stop_at >= 0:
                self._stops[new.request_id] = min(
                    (new.stop_at, new.stopped_by),
                    self._stops.get(new.request_id, (new.stop_at, "~")),
                )
            if new.scored:
                self._scored.setdefault(new.request_id, []).extend(new.scored)
        # a step that ran before the end was known has news of the request
        for request_id in self._over:
            self._stops.pop(request_id, None)
            self._scored.pop(request_id, None)
            self._ended.pop(request_id, None)
        self._over.clear()

    @property
    def tell(self) -> bool:
        """Return whether this step's tokens have news: then `cut` must see them."""
        return bool(self._stops or self._scored)

    def cut(self, request: Any, new_token_ids: list[int]) -> tuple[list[int], str]:
        """Return the step's tokens of a request that are kept, and the probe that ends the request
        after them; empty if none does.
        """
        first = request.num_tokens  # the position of the first new token
        stop_at, name = self._stops.pop(request.request_id, (-1, ""))
        limit = first + len(new_token_ids) - 1  # the last new token has no row yet
        if not 0 <= stop_at < limit:
            self._limits[request.request_id] = limit
            return new_token_ids, ""
        self._limits[request.request_id] = stop_at + 1
        return new_token_ids[: max(0, stop_at + 1 - first)], name

    def end(self, request_id: str, name: str) -> None:
        """Record that the probe `name` ends the request in this step."""
        self._ended[request_id] = name

    def ended_by(self, request_id: str) -> str:
        """Return the probe that ended the request; empty if none did."""
        return self._ended.get(request_id, "")

    def attach(self, outputs: Any) -> None:
        """Attach scores of kept tokens, and probes that ended requests, to the outputs of this
        step: client → `EngineCoreOutputs`.
        """
        if not self._scored and not self._ended:
            return
        for output in (output for item in outputs.values() for output in item.outputs):
            scored = self._scored.pop(output.request_id, [])
            limit = self._limits.get(output.request_id, 0)
            # a position that was computed again keeps its last scores
            kept = {item.position: item for item in scored if item.position < limit}
            more: dict[str, Any] = (
                {SCORES: [list(kept[place]) for place in sorted(kept)]} if kept else {}
            )
            if name := self.ended_by(output.request_id):
                more[STOPPED_BY] = name
            if more:
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), **more}

    def forget(self, request_id: str) -> None:
        """Forget a finished request in the next step, since its last tokens may not be sent yet."""
        self._over.append(request_id)
