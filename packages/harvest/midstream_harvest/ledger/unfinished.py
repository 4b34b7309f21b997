"""What a version that takes over from a newer one must be able to read of harvests."""

from collections.abc import AsyncIterator
from functools import partial

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.schemas.jobs.ledger_shares import NamedReading

from .harvests import LedgerHarvests


async def records(ledger: Ledger) -> AsyncIterator[NamedReading]:
    """Yield what each record of a harvest that has not ended is, and a call that reads it."""
    harvests = LedgerHarvests(ledger)
    for id in await harvests.live():
        yield f"harvest {id}", partial(harvests.stored, id)
        yield f"harvest {id}", partial(harvests.view, id)
