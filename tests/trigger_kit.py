"""Where a trigger is open, by looking at all tokens up to each position."""

from collections.abc import Sequence

from midstream.schemas.prompts.windows import Trigger


def open_of(trigger: Trigger, tokens: Sequence[int]) -> list[bool]:
    """Of each position, whether the trigger is open there."""

    def ends(place: int) -> bool:
        return any(
            list(tokens[max(place + 1 - len(sequence), 0) : place + 1]) == sequence
            for sequence in trigger.token_ids or ()
        )

    def near(place: int) -> bool:
        after = place if trigger.after == "end" else trigger.after
        return any(map(ends, range(max(place - after, 0), place + 1)))

    return [near(place) != trigger.skip for place in range(len(tokens))]
