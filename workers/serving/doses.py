"""Figures of a dose, from the outputs of its prompts."""

from collections.abc import Sequence

import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.doses import DoseMeasured, StoredDose
from ...schemas.jobs.jobs import Output

#: Length of the runs of tokens whose repetition counts.
GRAM = 4


def measure(dose: StoredDose, outputs: Sequence[Output]) -> DoseMeasured:
    """Return the figures of every cell. `outputs`: of the job's prompts, in order.

    Raises MidstreamError("engine_failed") for a prompt without log-probabilities.
    """
    cells = [
        outputs[first : first + dose.requests] for first in range(0, len(outputs), dose.requests)
    ]
    continued = [cell[: dose.prompts] for cell in cells]
    return DoseMeasured(
        dose=dose,
        texts=[[output.text for output in cell] for cell in continued],
        repetition=[
            float(np.mean([repetition(output.token_ids) for output in cell])) for cell in continued
        ],
        loss=[-_logprob(cell[len(cell) - dose.held_out :], 0) for cell in cells],
        effect=[_effect(dose, cell) for cell in cells],
    )


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams that occur earlier in the text; 0 for a shorter one."""
    grams = [tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _effect(dose: StoredDose, cell: Sequence[Output]) -> float:
    if dose.target_tokens:
        return _logprob(cell[dose.prompts : 2 * dose.prompts], dose.target_tokens)
    texts = [output.text.casefold() for output in cell[: dose.prompts]]
    words = [word.casefold() for word in dose.effect.words]
    return float(np.mean([any(word in text for word in words) for text in texts]))


def _logprob(outputs: Sequence[Output], last: int) -> float:
    """Return the mean log-probability of the prompts' last tokens; `last` 0: of all but the
    first.
    """
    values: list[float] = []
    for output in outputs:
        logprobs = output.prompt.logprobs if output.prompt else None
        tokens = [token.logprob for token in (logprobs or ())[-last:] if token is not None]
        if not tokens:
            detail = f"prompt {output.index} of the dose has no log-probabilities"
            raise MidstreamError("engine_failed", detail)
        values += tokens
    return float(np.mean(values))
