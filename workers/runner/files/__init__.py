"""The process that writes a rank's files and receipts, without torch."""
