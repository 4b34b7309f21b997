"""Registered tuned lenses of a ledger. The ledger's side of `schemas.lens`."""

from ....schemas.base.limits import MAX_TUNED
from ....schemas.requests.lens import TunedLens
from ..jobs.ledger import Ledger
from .registry import Registry


class TunedLenses(Registry[TunedLens]):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, TunedLens, "ms:lenses:", "tuned lens", MAX_TUNED)
