"""What a job does, as it is stored with the job: a record for each, with what the ledger and the
workers ask of it.
"""

from functools import cached_property

from ..base.limits import MAX_COUNT
from ..base.records import Record
from ..requests.harvest_work import HarvestPart
from .doses import StoredDose
from .fits import StoredFit
from .sweep_units import Units
from .sweeps import StoredSweep


class Work(Record, tag="prompts"):
    """Answering the job's prompts, and no more. Other works override what differs."""

    @property
    def title(self) -> str:
        """The text by which people recognise the job; empty: its first prompt."""
        return ""

    @property
    def tokens(self) -> int:
        """An estimate of the tokens that it costs, beside those of the job's prompts."""
        return 0

    @property
    def requests(self) -> int:
        """The number of its requests, beside one for each prompt; a bound on their numbers."""
        return 0

    @property
    def cells(self) -> int:
        """The most cells that are computed exactly."""
        return 0

    @property
    def tags(self) -> list[str]:
        """The tags of the captures that become files, beside those of the job's prompts."""
        return []

    @property
    def writes_files(self) -> bool:
        """Whether it writes files, beside those of captures."""
        return False

    @property
    def wants_receipts(self) -> bool:
        """Whether ranks report on its requests, whatever the job asks of them."""
        return False

    @property
    def surveyed(self) -> str:
        """The harvest that it surveys; empty: none."""
        return ""

    @property
    def lengths(self) -> dict[str, int]:
        """Field of the request → tokens that the model must have room for, beside the prompts."""
        return {}

    def continues(self, request: int) -> bool:
        """Return whether a prompt of the job is continued; otherwise its own tokens count."""
        return True


class SweepWork(Work, tag="sweep", dict=True):
    """A sweep, or an attribution."""

    sweep: StoredSweep

    @cached_property
    def units(self) -> Units:
        return Units(self.sweep)

    @property
    def title(self) -> str:
        """Both prompts of the first pair."""
        pair = self.sweep.pairs[0]
        texts = ["".join(tokens) for tokens in (pair.source_tokens, pair.base_tokens) if tokens]
        return " → ".join(texts)

    @property
    def tokens(self) -> int:
        return self.units.tokens

    @property
    def requests(self) -> int:
        return self.units.requests

    @property
    def cells(self) -> int:
        return self.sweep.num_exact

    @property
    def tags(self) -> list[str]:
        if not self.cells:
            return []
        return ["base"] if self.sweep.ablation else ["base", "source"]

    @property
    def wants_receipts(self) -> bool:
        return True

    @property
    def lengths(self) -> dict[str, int]:
        return {f"pairs[{index}]": pair.longest for index, pair in enumerate(self.sweep.pairs)}


class HarvestWork(Work, tag="harvest"):
    """A part of a harvest, or a survey of one."""

    part: HarvestPart

    @property
    def tokens(self) -> int:
        return self.part.tokens

    @property
    def requests(self) -> int:
        return MAX_COUNT

    @property
    def writes_files(self) -> bool:
        return self.part.role in ("run", "survey")

    @property
    def wants_receipts(self) -> bool:
        return True

    @property
    def surveyed(self) -> str:
        return self.part.harvest if self.part.survey else ""


class FitWork(Work, tag="fit"):
    """A fit of a module or a lens."""

    fit: StoredFit

    @property
    def title(self) -> str:
        return self.fit.title

    @property
    def tokens(self) -> int:
        return self.fit.tokens


class DoseWork(Work, tag="dose"):
    """Answering the prompts of all cells of a dose, and measuring the answers."""

    dose: StoredDose

    def continues(self, request: int) -> bool:
        return self.dose.continues(request)


AnyWork = Work | SweepWork | HarvestWork | FitWork | DoseWork
