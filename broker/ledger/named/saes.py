"""Registered sparse autoencoders of a ledger. The ledger's side of `schemas.saes`."""

from ....schemas.artifacts.saes import Sae
from ....schemas.base.limits import MAX_SAES
from ..jobs.ledger import Ledger
from .registry import Registry


class Saes(Registry[Sae]):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, Sae, "ms:saes:", "sparse autoencoder", MAX_SAES)
