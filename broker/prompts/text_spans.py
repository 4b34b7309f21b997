"""Positions of the tokens that cover a quoted piece of a prompt's text."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from unicodedata import normalize

import numpy as np

from ...schemas.base.errors import shortened
from ...schemas.prompts.selectors import SelectorError, Span, no_text

#: Characters of a prompt that an error shows.
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class TextMap:
    """Map from the tokens of a prompt to its text.

    `offsets`: int32 `[tokens, 2]`, `[start, end)` in characters; empty for tokens that have no
    text.
    """

    text: str
    offsets: np.ndarray
    _starts: dict[str, np.ndarray] = field(
        default_factory=dict, repr=False, compare=False
    )  # text → where its occurrences begin

    def find(self, span: Span) -> list[int]:
        """Return the positions of the tokens that overlap the span of the text.

        Occurrences do not overlap, as in `str.count`. Each text is searched for once, however many
        spans name it. Raises SelectorError if the text does not occur often enough, or if no token
        covers it.
        """
        if span.text is None:
            return no_text(span)
        if span.text not in self._starts:
            self._starts[span.text] = np.array(self._occurrences(span.text))
        starts = self._starts[span.text]
        if span.occurrence is not None:
            if not -len(starts) <= span.occurrence < len(starts):
                detail = (
                    f"{shortened(span.text)!r} occurs "
                    f"{'once' if len(starts) == 1 else f'{len(starts)} times'} in the prompt: "
                    f"there is no occurrence {span.occurrence}"
                )
                raise SelectorError(detail, ".occurrence")
            starts = starts[[span.occurrence]]
        without = f"{shortened(span.text)!r} is in the prompt, but no token covers it"
        return self.covering(starts, starts + len(span.text), SelectorError(without, ".text"))

    def covering(self, starts: np.ndarray, stops: np.ndarray, without: SelectorError) -> list[int]:
        """Return the ascending positions of the tokens with a character in one of these pieces.
        `without`: raised if there is none.
        """
        positions, begins, ends, furthest = self._tokens
        first = np.searchsorted(
            furthest, starts, side="right"
        )  # of each piece, the first token that may reach into it
        count = np.maximum(np.searchsorted(begins, stops, side="left") - first, 0)
        piece = np.repeat(np.arange(len(starts)), count)
        token = np.arange(len(piece)) + (first - (np.cumsum(count) - count))[piece]
        result: list[int] = np.unique(positions[token[ends[token] > starts[piece]]]).tolist()
        if not result:
            raise without
        return result

    @cached_property
    def without_text(self) -> np.ndarray:
        """Return the positions of the tokens that have no character."""
        return np.flatnonzero(self.offsets[:, 0] >= self.offsets[:, 1])

    @cached_property
    def _tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens with text in order of their beginnings: position, begin, end,
        furthest end so far.
        """
        begins = self.offsets[:, 0]
        ends = self.offsets[:, 1]
        positions = np.flatnonzero(ends > begins)
        positions = positions[np.argsort(begins[positions], kind="stable")]
        return positions, begins[positions], ends[positions], np.maximum.accumulate(ends[positions])

    def _occurrences(self, part: str) -> list[int]:
        starts = []
        at = self.text.find(part)
        while at >= 0:
            starts.append(at)
            at = self.text.find(part, at + len(part))
        if not starts:
            shown = (
                self.text
                if len(self.text) <= SHOWN_CHARACTERS
                else self.text[:SHOWN_CHARACTERS] + "…"
            )
            forms = (normalize(form, part) for form in ("NFC", "NFD"))
            same = [
                f"; it occurs after Unicode normalisation: the prompt has {form!a}"
                for form in forms
                if form in self.text
            ]
            raise SelectorError(
                f"{part[:SHOWN_CHARACTERS]!r} does not occur in the prompt, which begins {shown!r}"
                + "".join(same),
                ".text",
            )
        return starts


def untrimmed(tokenizer_json: str) -> tuple[str, int]:
    """Return the tokenizer with offsets that cover whole tokens, and the characters of its longest
    token.

    Offsets of byte-level tokenizers otherwise leave out the space that a token begins with.
    """
    tokenizer = json.loads(tokenizer_json)
    processor = tokenizer.get("post_processor") or {}
    for step in [processor, *processor.get("processors", [])]:
        if "trim_offsets" in step:
            step["trim_offsets"] = False
    vocabulary = (
        tokenizer["model"].get("vocab") or []
    )  # token → id; for Unigram, pairs of token and score
    pieces = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    added = [token["content"] for token in tokenizer.get("added_tokens") or []]
    return json.dumps(tokenizer), max(map(len, [*pieces, *added]), default=1)
