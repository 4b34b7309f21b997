"""Where a policy looks: the parts of a conversation in its prompt, and which tokens it reads."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ..base.limits import MAX_LOOKS
from ..base.records import Record
from .chat import Role
from .selectors import PositionNumber

#: Parts of a message that its sender writes; `tools`: the definitions of tools, of no message.
WrittenPart = Literal["content", "reasoning", "tool_calls", "tools"]
#: What a policy reads if it names no parts; `content`: all that the sender wrote, and what is
#: generated; where a prompt's turns are not known, its whole prompt; `all`: also the chat
#: template's own tokens.
TokenSet = Literal["content", "generated", "all"]


class TurnLook(Record, omit_defaults=True):
    """Part of the messages with a role (null: of any); of the one with this index among them
    (negative: from the last), or of all (null). Without a `part`, all that its sender wrote.

    Without `turn`, what is generated belongs to the assistant's messages.
    """

    role: Role | None = None
    turn: PositionNumber | None = None
    part: WrittenPart | None = None

    def __post_init__(self) -> None:
        if (self.role, self.turn, self.part) == (None, None, None):
            raise ValueError("names nothing: give role, turn or part, or 'content' for everything")
        if self.part == "tools" and (self.role, self.turn) != (None, None):
            raise ValueError("part 'tools' is of the whole conversation: omit role and turn")

    @property
    def reads_answer(self) -> bool:
        """Return whether it has the generated tokens."""
        return self.role in (None, "assistant") and self.turn is None and self.part != "tools"


Looks = Annotated[list[TurnLook], msgspec.Meta(min_length=1, max_length=MAX_LOOKS)]


class TurnPiece(Record, omit_defaults=True):
    """Consecutive tokens `[start, stop)` of a prompt that its sender wrote."""

    start: int
    stop: int
    # empty: of what no part has, such as names and variables of the template; every policy reads it
    part: str = ""
    # the messages that it may be of, by their index; empty: of none, or any
    messages: list[int] = []


class TurnMap(Record, omit_defaults=True):
    """What the sender of a conversation wrote in its prompt; the rest is the chat template's own,
    whatever was sent.
    """

    roles: list[str] = []  # of the messages, as they were sent
    pieces: list[TurnPiece] = []  # ascending
    unknown: str = ""  # why that is not known


class Sight(Record, omit_defaults=True):
    """The tokens of a prompt that a policy reads."""

    runs: list[tuple[int, int]] = []  # ascending, without their ends
    whole: str = ""  # why it reads all of them instead


#: Of a prompt that is not made of a conversation.
NO_TURNS = "the prompt has no turns"


def sight_of(tokens: TokenSet | Sequence[TurnLook], turns: TurnMap | None) -> Sight | None:
    """Return what a policy of these `tokens` reads of a prompt; None where they say it alone."""
    if tokens in ("generated", "all"):
        return None
    if turns is None or turns.unknown:
        return Sight(whole=NO_TURNS if turns is None else turns.unknown)
    chosen = [
        (piece.start, piece.stop)
        for piece in turns.pieces
        if isinstance(tokens, str) or not piece.part or _is_looked_at(piece, tokens, turns.roles)
    ]
    return Sight(runs=_joined(chosen))


def _is_looked_at(piece: TurnPiece, looks: Sequence[TurnLook], roles: Sequence[str]) -> bool:
    for look in looks:
        if look.part not in (None, piece.part):
            continue
        if look.part == "tools" or not {*piece.messages}.isdisjoint(_chosen(look, roles)):
            return True
    return False


def _chosen(look: TurnLook, roles: Sequence[str]) -> list[int]:
    """Return the indices of the messages that a look names. `developer` is another name of the
    system: the sender's choice of it hides nothing.
    """
    wanted = _plain(look.role)
    numbers = [number for number, role in enumerate(roles) if wanted in (None, _plain(role))]
    if look.turn is None:
        return numbers
    return numbers[look.turn :][:1] if -len(numbers) <= look.turn else []


def _plain(role: str | None) -> str | None:
    return "system" if role == "developer" else role


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending runs that neither overlap nor touch."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if joined and start <= joined[-1][1]:
            start, former = joined.pop()
            stop = max(stop, former)
        joined.append((start, stop))
    return joined


def reads_answer(tokens: TokenSet | Sequence[TurnLook]) -> bool:
    """Return whether a policy of these `tokens` reads what is generated."""
    return isinstance(tokens, str) or any(look.reads_answer for look in tokens)
