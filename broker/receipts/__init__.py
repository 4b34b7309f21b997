"""Receipts from a rank to the ledger: outbox on the rank's disk, sender, relay, CURVE keys."""
