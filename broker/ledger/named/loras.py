"""Registered LoRA adapters of a ledger. The ledger's side of `schemas.loras`."""

from ....schemas.artifacts.loras import Lora
from ....schemas.base.limits import MAX_LORAS
from ..jobs.ledger import Ledger
from .registry import Registry


class Loras(Registry[Lora]):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, Lora, "ms:loras:", "adapter", MAX_LORAS)
