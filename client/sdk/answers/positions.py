"""Positions of a prompt with their tokens, as `client.positions` returns them."""

from collections.abc import Iterable
from typing import NamedTuple


class TokenAt(NamedTuple):
    """A token of the prompt."""

    position: int
    text: str
    id: int


class SelectedTokens(list[TokenAt]):
    """The tokens at positions of a prompt, in its order; printed, a line for each. `generated`:
    whether the positions go on with tokens that are generated.
    """

    def __init__(self, tokens: Iterable[TokenAt], generated: bool = False):
        super().__init__(tokens)
        self.generated = generated

    def __repr__(self) -> str:
        lines = [f"{at.position:>4}  {at.text!r}  {at.id}" for at in self]
        return "\n".join([*lines, *["   …  the tokens that are generated"] * self.generated])
