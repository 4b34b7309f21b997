"""What harvests have in the ledger, beside their jobs."""

from midstream.schemas.jobs.ledger_shares import LedgerShare

SHARE = LedgerShare(
    keys=("~ms:harvest*",),
    charged={"harvests": "harvest"},
    duty="midstream_harvest.ledger.harvests:advance_all",
    check="midstream_harvest.ledger.unfinished:records",
)
