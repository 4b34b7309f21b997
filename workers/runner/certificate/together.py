"""Parts of the certification that all ranks of a stage go through together, since they make
collective calls: a rank that failed alone must not leave the others waiting.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

logger = logging.getLogger(__name__)

#: Seconds that a rank which failed waits for the others, which may still compute. Those that wait
#: for it in a collective call never answer.
PATIENCE_S = 10.0
#: Seconds that a rank which did not fail waits for the others.
_LONGEST_S = 120.0
#: Bytes of a reason that the other ranks get.
_SIZE = 1024


class FailedAloneError(RuntimeError):
    """Not all ranks of the stage failed: the run is over, on every rank."""


class NoAnswerError(FailedAloneError):
    """The other ranks do not answer: they wait for this one in a collective call, and only the end
    of its process ends that.
    """


class StageRanks:
    """The ranks of this rank's stage."""

    def __init__(self, group: Any) -> None:
        """`group`: vLLM's group of the stage's ranks."""
        self._group = group

    def attempt(self, part: str, act: Callable[[], None], *, needed: bool = False) -> str:
        """Go through a part with all ranks; return why all of them failed, or an empty text.

        Raises FailedAloneError on all ranks if some of them failed, or all and the part is
        `needed`.
        """
        failure: Exception | None = None
        try:
            act()
        except FailedAloneError:
            raise
        except Exception as error:
            logger.warning("certification: %s", part, exc_info=True)
            failure = error
        why = "" if failure is None else str(failure).strip() or type(failure).__name__
        answers = self._answers(part, why)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        if failed and (needed or len(failed) < len(answers)):
            raise FailedAloneError(f"the certification failed at {part}: {'; '.join(failed)}")
        return why

    def _answers(self, part: str, why: str) -> list[str]:
        """Return why each rank failed; empty: it did not. Raises NoAnswerError."""
        if self._group.world_size == 1:
            return [why]
        mine = torch.frombuffer(bytearray(why.encode()[:_SIZE].ljust(_SIZE)), dtype=torch.uint8)
        answers = [torch.empty_like(mine) for _ in range(self._group.world_size)]
        patience = timedelta(seconds=PATIENCE_S if why else _LONGEST_S)
        try:
            gathering = torch.distributed.all_gather(
                answers, mine, group=self._group.cpu_group, async_op=True
            )
            assert gathering is not None
            gathering.wait(patience)
        except RuntimeError as error:
            reason = why or "the other ranks do not answer"
            raise NoAnswerError(
                f"the certification failed at {part} on rank {self._group.rank_in_group}: {reason}"
            ) from error
        return [bytes(answer.tolist()).decode(errors="replace").rstrip() for answer in answers]
