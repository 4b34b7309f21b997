"""Next-token predictions of a run, indexed like TransformerLens' logits and fetched from the server
on access.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.limits import MAX_LENS_TOKENS, MAX_LENS_TOP
from midstream.schemas.base.records import by_key
from midstream.schemas.readings.lens import LensReading

from .cache import refused

#: Request to the server: (index of the prompt, positions, number of top tokens, ids of named
#: tokens) → predictions from the last layer's rows.
AskLens = Callable[[int, list[int], int, list[int]], LensReading]
#: Bytes of a response for each row, and for each token of a row.
_ROW_BYTES = 14
_TOKEN_BYTES = 8
REFUSED: dict[str, str] = dict.fromkeys(
    ("backward", "grad", "requires_grad", "retain_grad"),
    "there are no gradients: the numbers come from a server",
)


#: (index of the prompt, position).
Place = tuple[int, int]


class Predictions:
    """Stores and fetches predictions of the next token at each position of a run's prompts."""

    def __init__(self, ask: AskLens, prompts: Sequence[Sequence[int]], vocab: int, limit_kib: int):
        self.prompts = [list(prompt) for prompt in prompts]
        self.vocab = vocab
        self._ask = ask
        self._limit = limit_kib << 10
        self._top: dict[Place, list[int]] = {}  # its most likely tokens, as far as known
        self._known: dict[Place, dict[int, float]] = {}

    def learn(self, reading: LensReading, prompt: int) -> None:
        """Store a response of the server."""
        for row, position in enumerate(reading.positions):
            place = prompt, position
            top = reading.top_tokens[0][row]
            if len(top) > len(self._top.get(place, [])):
                self._top[place] = top
            known = self._known.setdefault(place, {})
            known.update(zip(top, reading.top_logprobs[0][row], strict=True))
            if reading.named_tokens:
                known.update(zip(reading.named_tokens, reading.named_logprobs[0][row], strict=True))

    def top(self, places: Sequence[Place], count: int) -> list[list[int]]:
        """Return the `count` most likely tokens at each place, most likely first."""
        few = [place for place in places if len(self._top.get(place, [])) < count]
        self._fetch(few, count, [])
        return [self._top[place][:count] for place in places]

    def values(self, wanted: Sequence[tuple[Place, int]]) -> np.ndarray:
        """Return the log-probability of each (place, token): float32 `[wanted]`. Those that are not
        stored yet are fetched, in as few requests as possible.
        """
        lacking = by_key(
            (token, place) for place, token in wanted if token not in self._known.get(place, {})
        )
        missing = list(lacking)
        for start in range(0, len(missing), MAX_LENS_TOKENS):
            part = missing[start : start + MAX_LENS_TOKENS]
            self._fetch([place for token in part for place in lacking[token]], 1, part)
        return np.array([self._known[place][token] for place, token in wanted], dtype=np.float32)

    def _fetch(self, places: Sequence[Place], top: int, tokens: list[int]) -> None:
        rows = max(1, self._limit // (_ROW_BYTES + _TOKEN_BYTES * (top + len(tokens))))
        for prompt, positions in by_key(places).items():
            ordered = sorted(set(positions))
            for start in range(0, len(ordered), rows):
                self.learn(self._ask(prompt, ordered[start : start + rows], top, tokens), prompt)


class Logits:
    """Log-probabilities of next tokens, float32, in nats: `logits[0, -1, token]`.

    They are the model's logits minus a constant per position, so differences between tokens,
    softmax, argmax and ranks are those of the logits. `shape` is `[batch, pos, d_vocab]`. The first
    axes take numbers, slices and lists; the last axis takes token ids, since whole rows do not
    leave the server, and `topk` returns the most likely tokens. Values that are not stored yet are
    fetched with further requests.
    """

    def __init__(
        self, known: Predictions, places: np.ndarray | None = None, probabilities: bool = False
    ):
        self._known = known
        self._probabilities = probabilities
        if places is None:
            count = len(known.prompts)
            length = len(known.prompts[0])
            places = np.arange(count * length).reshape(count, length)
        self._places = places  # `[…]`: prompt · length + position

    def __repr__(self) -> str:
        return (
            f"Logits(shape={list(self.shape)}, "
            f"{'probabilities' if self._probabilities else 'log-probabilities'})"
        )

    def __getattr__(self, name: str) -> Any:
        raise refused(REFUSED, type(self).__name__, name)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._places.shape, self._known.vocab)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise invalid("tokens", "whole rows of logits do not leave the server", allowed=_ALLOWED)

    def __getitem__(self, key: Any) -> Any:
        keys = list(key) if isinstance(key, tuple) else [key]
        dots = [number for number, item in enumerate(keys) if item is Ellipsis]
        if len(dots) > 1 or len(keys) - len(dots) > self.ndim:
            raise IndexError(f"too many indices: the shape is {list(self.shape)}")
        for at in dots:
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        tokens = keys.pop() if len(keys) == self.ndim else None
        places = self._places[tuple(keys)] if keys else self._places
        if tokens is None or (isinstance(tokens, slice) and tokens == slice(None)):
            return Logits(self._known, np.asarray(places), self._probabilities)
        return self._values(np.asarray(places), self._ids(tokens))

    def _ids(self, tokens: Any) -> np.ndarray:
        """Return token ids as int64, 0-d for a single id. Raises MidstreamError for invalid ids."""
        if isinstance(tokens, slice):
            tokens = range(*tokens.indices(self._known.vocab))
            if len(tokens) > MAX_LENS_TOKENS:
                raise invalid(
                    "tokens",
                    f"the slice has {len(tokens)} tokens",
                    allowed=f"up to {MAX_LENS_TOKENS}; or topk",
                )
        ids = np.asarray(tokens)
        if ids.dtype.kind not in "iu" or ids.ndim > 1:
            raise invalid("tokens", f"{str(tokens)[:80]} are not token ids", allowed=_ALLOWED)
        vocab = self._known.vocab
        if ids.size and not (-vocab <= ids.min() and ids.max() < vocab):
            raise invalid(
                "tokens",
                f"a token id is out of range: {ids.min()} to {ids.max()}",
                allowed=f"0 to {vocab - 1}",
            )
        return np.where(ids < 0, ids + vocab, ids)

    def _where(self, places: np.ndarray) -> list[Place]:
        length = len(self._known.prompts[0])
        return [divmod(place, length) for place in places.ravel().tolist()]

    def _values(self, places: np.ndarray, ids: np.ndarray) -> Any:
        """Return the values of `ids` at `places`: float32 `[places…, ids…]`."""
        tokens = ids.ravel().tolist()
        wanted = [(place, token) for place in self._where(places) for token in tokens]
        return self._scaled(wanted).reshape((*places.shape, *ids.shape))[()]

    def _scaled(self, wanted: Sequence[tuple[Place, int]]) -> np.ndarray:
        logprobs = self._known.values(wanted)
        return np.exp(logprobs) if self._probabilities else logprobs

    def topk(self, k: int, dim: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """Return (values float32 `[…, k]`, token ids int64 `[…, k]`), most likely first. `k`: up to
        100.
        """
        self._of_tokens(dim)
        if not 1 <= k <= MAX_LENS_TOP:
            raise invalid("k", f"{k} is out of range", allowed=f"1 to {MAX_LENS_TOP}")
        where = self._where(self._places)
        tops = self._known.top(where, k)
        wanted = [(place, token) for place, top in zip(where, tops, strict=True) for token in top]
        shape = *self._places.shape, k
        return self._scaled(wanted).reshape(shape), np.array(tops, dtype=np.int64).reshape(shape)

    def argmax(self, dim: int = -1) -> Any:
        """Return the most likely tokens: int64 `[…]`."""
        return self.topk(1, dim)[1][..., 0][()]

    def log_softmax(self, dim: int = -1) -> "Logits":
        """Return log-probabilities."""
        self._of_tokens(dim)
        return Logits(self._known, self._places)

    def softmax(self, dim: int = -1) -> "Logits":
        """Return probabilities."""
        self._of_tokens(dim)
        return Logits(self._known, self._places, probabilities=True)

    def _of_tokens(self, dim: int) -> None:
        if dim not in (-1, self.ndim - 1):
            raise invalid(
                "dim", f"{dim} is not the axis of tokens", allowed=f"-1 or {self.ndim - 1}"
            )

    def loss(self, per_token: bool = False) -> Any:
        """Return the mean cross-entropy of the prompts' next tokens, in nats; with `per_token`,
        float32 `[batch, pos - 1]`.

        Raises MidstreamError for indexed logits, and for prompts of one token.
        """
        prompts = self._known.prompts
        if self._places.shape != (len(prompts), len(prompts[0])):
            raise invalid(
                "loss", "needs whole prompts", allowed="the logits that run_with_cache returned"
            )
        if len(prompts[0]) < 2:
            raise MidstreamError(
                "invalid_request",
                "a prompt of one token has no next token",
                field="prompt",
                allowed="two tokens or more",
            )
        losses = [
            -self._known.values([((number, at), token) for at, token in enumerate(prompt[1:])])
            for number, prompt in enumerate(prompts)
        ]
        result = np.stack(losses)
        return result if per_token else np.float32(result.mean())


_ALLOWED = "token ids, as in logits[0, -1, [10, 20]]; or logits[0, -1].topk(k)"
