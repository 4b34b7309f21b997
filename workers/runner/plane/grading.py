"""Grading of the next token after a prompt, from the logits before vLLM's sampler changes them.

`docs/decisions/0006-reentry-and-grading.md` explains why this does not use
`SamplingParams.logprob_token_ids`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ....schemas.base.records import by_key
from ....schemas.requests.specs import Grade
from ..base.engine_step import StepView
from ..base.host_memory import locked_copy, locked_like
from ..base.landings import LANDED, Landing
from ..rows.planner import Tracked
from .step_parts import StepBatch, StepPart

#: Distributions kept for comparison; the least recently used are evicted first.
KEPT = 64


class _Due(NamedTuple):
    tracked: Tracked
    grade: Grade
    row: int  # row of the step's logits: that of the prompt's last token
    number: int  # among those that are due


class Grading(StepPart):
    """Grading on the last stage's first rank: `plan` before the forward, `take` with its logits."""

    def __init__(self) -> None:
        self._due: list[_Due] = []
        self._rows = 0  # rows of the step's logits
        # name → log-probabilities, float32 `[vocabulary]`
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    @property
    def due(self) -> list[Tracked]:
        """Return the requests to grade whose prompts end in the planned step, until `take`."""
        return [due.tracked for due in self._due]

    def plan(self, batch: StepBatch, view: StepView) -> None:
        self._due = []
        self._rows = 0
        if not batch.watched:
            return
        members = dict(batch.special)
        for number, rows in enumerate(view.requests):
            self._rows += rows.samples
            tracked = members.get(number)
            # A preempted request computes its prompt again, and keeps its first grade.
            if tracked is None or tracked.graded is not None or tracked.reported:
                continue
            # vLLM may pad a prompt's last chunk with drafts
            drafts = rows.first_position + rows.num_rows - tracked.spec.prompt_tokens
            if tracked.spec.grade is not None and 0 <= drafts < rows.num_rows:
                row = self._rows - 1 - drafts
                self._due.append(_Due(tracked, tracked.spec.grade, row, len(self._due)))

    def take(self, logits: torch.Tensor) -> list[tuple[Tracked, str]]:
        """Grade the requests that are due with their step's logits `[rows, vocabulary]`; return
        those that cannot be graded, with the reason.

        Does not wait: values may still be copied from the device when this returns.
        """
        # Only the first logits after a plan are the step's: warm-up precedes every plan, and logits
        # of prompt tokens come after those for the sampler.
        due = self._due
        self._due = []
        if not due:
            return []
        # The step's sampled rows are one for each request, and one more for each draft token.
        if logits.ndim != 2 or len(logits) != self._rows:
            return [
                (
                    item.tracked,
                    f"the step returned logits {list(logits.shape)}; expected {self._rows} rows",
                )
                for item in due
            ]
        logprobs = torch.log_softmax(
            logits.index_select(0, _on_device([item.row for item in due], logits.device)).float(),
            dim=-1,
        )
        for item in due:
            if item.grade.keep:
                self._kept[item.grade.keep] = logprobs[item.number].clone()
                self._kept.move_to_end(item.grade.keep)
        graded = list[_Due]()
        refused = list[tuple[Tracked, str]]()
        for item in due:
            if why := self._refusal(item.grade, logits.shape[1]):
                refused.append((item.tracked, why))
            else:
                graded.append(item)
        self._grade(graded, logprobs)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return refused

    def forget(self) -> None:
        """Drop all kept distributions."""
        self._due.clear()
        self._kept.clear()

    def _refusal(self, grade: Grade, vocabulary: int) -> str:
        # an index out of range would end an accelerator's process
        if outside := [token for token in grade.token_ids if not 0 <= token < vocabulary]:
            return f"token ids {outside} are outside the vocabulary of {vocabulary}"
        if grade.against and grade.against not in self._kept:
            return f"the reference distribution {grade.against!r} is no longer stored"
        return ""

    def _grade(self, due: Sequence[_Due], logprobs: torch.Tensor) -> None:
        """Set `graded` of the requests in `due`, each of which has the row of its number."""
        rows = [item.number for item in due for _ in item.grade.token_ids]
        tokens = [token for item in due for token in item.grade.token_ids]
        places = _on_device([rows, tokens], logprobs.device)
        parts = [logprobs[places[0], places[1]].double()]
        ends = len(tokens)
        against = by_key(
            (item.grade.against, place) for place, item in enumerate(due) if item.grade.against
        )
        divergence: dict[int, int] = {}  # place in `due` → index of its value
        for name, of_name in against.items():
            self._kept.move_to_end(name)
            parts.append(
                _divergence(
                    self._kept[name],
                    logprobs.index_select(
                        0, _on_device([due[place].number for place in of_name], logprobs.device)
                    ),
                )
            )
            divergence |= {place: ends + number for number, place in enumerate(of_name)}
            ends += len(of_name)
        values = torch.cat(parts)
        begin = 0
        copy = values
        landing = LANDED
        if values.device.type != "cpu":
            copy = locked_like(values)
            copy.copy_(values, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
            landing = Landing(event)
        for place, item in enumerate(due):
            indices = list(range(begin, begin + len(item.grade.token_ids)))
            begin += len(item.grade.token_ids)
            if place in divergence:
                indices.append(divergence[place])
            item.tracked.graded = partial(_landed, landing, copy, indices)


def _divergence(kept: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence D(kept ‖ row) of each row in nats, float64 `[rows]`, from
    log-probabilities `[vocabulary]` and `[rows, vocabulary]`.
    """
    first = kept.double()
    share = first.exp()
    # A token of probability 0 in `kept` adds nothing, regardless of its probability in the row.
    return torch.where(share > 0, share * (first - logprobs.double()), 0.0).sum(dim=-1)


def _on_device(numbers: Any, device: torch.device) -> torch.Tensor:
    """Copy integers to the device, without waiting for it."""
    local = torch.tensor(numbers, dtype=torch.int64)
    return local if device.type == "cpu" else locked_copy(local).to(device, non_blocking=True)


def _landed(landing: Landing, values: torch.Tensor, indices: Sequence[int]) -> list[float]:
    """Return these values once they have been copied from the device."""
    landing.wait()
    return [float(values[index]) for index in indices]


def tap(model: nn.Module, take: Callable[[torch.Tensor], None]) -> None:
    """Pass every result of `model.compute_logits` to `take`, including dummy runs and logits of
    prompt tokens.
    """
    # In both runners this runs outside compiled graphs, and before temperature, penalties and
    # grammar masks. Soft caps and scales belong to the model, and are included.
    compute_logits = model.compute_logits

    def with_grades(*args: Any, **kwargs: Any) -> Any:
        # None: only another rank of the stage gets the logits
        if (logits := compute_logits(*args, **kwargs)) is not None:
            take(logits)
        return logits

    model.compute_logits = with_grades
