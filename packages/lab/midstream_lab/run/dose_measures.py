"""Figures of a dose, from the outputs of its prompts."""

from collections.abc import Sequence

import numpy as np

from midstream.schemas.artifacts.conditions import POLICY
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import Output

from ..records.doses import DoseCell, DoseResult, StoredDose

#: Length of the runs of tokens whose repetition counts.
GRAM = 4


def measure(dose: StoredDose, outputs: Sequence[Output]) -> DoseResult:
    """Return the figures of every cell, without those of the receipts. `outputs`: of the job's
    prompts, in order.

    Raises MidstreamError("engine_failed") for a prompt without log-probabilities.
    """
    cells: list[DoseCell] = []
    for number, (layer, scale) in enumerate(dose.cells):
        of_cell = outputs[number * dose.requests : (number + 1) * dose.requests]
        texts = of_cell[: dose.prompts]
        held_out = of_cell[dose.prompts + len(dose.target_tokens) :]
        loss = -float(np.mean([value for output in held_out for value in _logprobs(output)]))
        repeated = float(np.mean([repetition(output.token_ids) for output in texts]))
        stopped = sum(output.finish_reason.startswith(POLICY) for output in texts)
        # the first cell's own, to which those of others are compared
        loss_of, repeated_of = (cells[0].loss, cells[0].repetition) if cells else (0.0, repeated)
        cells.append(
            DoseCell(
                layer=layer,
                scale=scale,
                effect=_effect(dose, of_cell),
                loss=loss - loss_of,
                repetition=repeated,
                # texts that a policy has cut cannot be compared
                safe=not stopped
                and (
                    not cells
                    or (
                        not cells[0].stopped
                        and loss - loss_of <= dose.max_loss
                        and repeated - repeated_of <= dose.max_repetition
                    )
                ),
                stopped=stopped,
                text=texts[0].text,
            )
        )
    return DoseResult(dose=dose, unsteered=cells[0], cells=cells[1:])


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams that occur earlier in the text; 0 for a shorter one."""
    grams = [tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _effect(dose: StoredDose, cell: Sequence[Output]) -> float:
    whole = zip(cell[dose.prompts :], dose.target_tokens, strict=False)
    if values := [value for output, count in whole for value in _logprobs(output)[-count:]]:
        return float(np.mean(values))
    words = [word.casefold() for word in dose.effect.words]
    texts = [output.text.casefold() for output in cell[: dose.prompts]]
    return float(np.mean([any(word in text for word in words) for text in texts]))


def _logprobs(output: Output) -> list[float]:
    """Return the log-probabilities of a prompt's tokens from the second on."""
    tokens = output.prompt.logprobs if output.prompt else None
    if not tokens:
        detail = (
            f"prompt {output.index} of the dose has no log-probabilities; it ended with "
            f"{output.finish_reason!r}"
        )
        raise MidstreamError("engine_failed", detail)
    return [token.logprob for token in tokens if token is not None]
