"""Registered sparse autoencoders of a ledger. The ledger's side of `schemas.saes`."""

from ...schemas.limits import MAX_SAES
from ...schemas.saes import Sae
from .jobs import Ledger
from .registry import Registry


class Saes(Registry[Sae]):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, Sae, "ms:saes:", "sparse autoencoder", MAX_SAES)
