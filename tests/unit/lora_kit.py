"""Adapters of a rank, with what stands for vLLM's managers of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from midstream.schemas.artifacts.loras import LoraUse
from midstream.workers.runner.plane.loras import LoadedAdapters

#: An adapter that vLLM holds under the number 1.
ADAPTER = LoraUse(name="a", digest="d" * 64)


def holding_adapter(rows: int) -> tuple[LoadedAdapters, Any]:
    """The adapters of a rank that holds `ADAPTER`, and what stands for vLLM's manager: it computes
    each of so many rows with it.
    """
    manager = SimpleNamespace(
        punica_wrapper_mapping={},
        lora_index_to_id=[1],
        _last_mapping=SimpleNamespace(index_mapping=(1,) * rows),
    )
    loras = LoadedAdapters(SimpleNamespace(_adapter_manager=manager), Path("/nowhere"))
    loras._digests[1] = ADAPTER.digest
    return loras, manager
