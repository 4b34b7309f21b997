"""What a job does, as it is stored with the job: a record for each, with what the ledger and the
workers ask of it.
"""

from functools import cached_property
from typing import NamedTuple

from ..base import Record
from ..base.limits import MAX_COUNT
from ..requests.harvest_work import HarvestPart
from .doses import StoredDose
from .fits import StoredFit
from .sweep_units import Units
from .sweeps import StoredSweep


class WorkFacts(NamedTuple):
    """What is asked of every job. The defaults are those of a job that answers its prompts."""

    title: str = ""  # the text by which people recognise it; empty: its first prompt
    tokens: int = 0  # an estimate of what it costs, beside its prompts
    requests: int = 0  # how many there may be, beside one for each prompt
    cells: int = 0  # the most that are computed exactly
    tags: tuple[str, ...] = ()  # of captures that become files, beside those of its prompts
    # field of the request → tokens that the model must have room for, beside its prompts
    lengths: tuple[tuple[str, int], ...] = ()
    writes_files: bool = False  # beside those of captures
    wants_receipts: bool = False  # ranks report on its requests, whatever the job asks of them
    surveyed: str = ""  # the harvest that it surveys


class Work(Record, tag="prompts", dict=True):
    """Answering the job's prompts, and no more."""

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts()

    def continues(self, request: int) -> bool:
        """Return whether a prompt of the job is continued; otherwise its own tokens count."""
        return True


class SweepWork(Work, tag="sweep"):
    """A sweep, or an attribution."""

    sweep: StoredSweep

    @cached_property
    def units(self) -> Units:
        return Units(self.sweep)

    @cached_property
    def facts(self) -> WorkFacts:
        pairs = self.sweep.pairs
        units = self.units
        cells = self.sweep.num_exact
        prompts = (pairs[0].source_tokens, pairs[0].base_tokens)
        return WorkFacts(
            title=" → ".join("".join(tokens) for tokens in prompts if tokens),
            tokens=units.tokens,
            requests=units.requests,
            cells=cells,
            tags=("base", "source")[: 1 if self.sweep.ablation else 2] if cells else (),
            lengths=tuple((f"pairs[{index}]", pair.longest) for index, pair in enumerate(pairs)),
            wants_receipts=True,
        )


class HarvestWork(Work, tag="harvest"):
    """A part of a harvest, or a survey of one."""

    part: HarvestPart

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts(
            tokens=self.part.tokens,
            requests=MAX_COUNT,
            writes_files=self.part.role in ("run", "survey"),
            wants_receipts=True,
            surveyed=self.part.harvest if self.part.survey else "",
        )


class FitWork(Work, tag="fit"):
    """A fit of a module or a lens."""

    fit: StoredFit

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts(title=self.fit.title, tokens=self.fit.tokens)


class DoseWork(Work, tag="dose"):
    """Answering the prompts of all cells of a dose, and measuring the answers."""

    dose: StoredDose

    def continues(self, request: int) -> bool:
        return self.dose.continues(request)


AnyWork = Work | SweepWork | HarvestWork | FitWork | DoseWork
