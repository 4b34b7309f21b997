"""Hands the documents of a harvest's stream to a trainer as `hs_connectors` and vLLM's
hidden-states connector do with files.

A document is a sample: `hidden_states` `[tokens, layers, hidden]`, `token_ids` and `loss_mask`. A
trainer takes a sample by deleting it.
"""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from midstream.client.sdk.client import Client
from midstream.schemas.base.errors import invalid
from midstream.storage.file_store import sync
from midstream.storage.store import open_store

from ..files.shards import StreamedUnit, shard_buffers
from ..reader.exports import NamedBits, documents

#: Seconds between two looks at what a trainer has taken; and for which a unit is waited for.
PAUSE_S = 0.1
LONGEST_S = 25.0
Samples = Iterable[tuple[int, list[NamedBits]]]


@dataclass(frozen=True)
class TransferFolder:
    """Files `hs_<document>.safetensors`, as `FileTransfer` of hs_connectors reads them.

    The files of a unit are staged in a folder and moved from there, one by one; the empty folder
    stays until the unit is acknowledged. So no restart writes a file again that a trainer may have
    taken. The folders have the harvest's name: documents of another would have the same names.
    """

    path: Path
    harvest: str

    def put(self, cursor: int, samples: Samples) -> None:
        """Offer the samples of the unit before `cursor`, or the rest of them after a restart; they
        are durable then. Raises MidstreamError if the folder has samples of another harvest.
        """
        own = self.path / f"harvest-{self.harvest}"
        stray = () if own.exists() else self.path.glob("hs_*")
        if {*self.path.glob("harvest-*"), *stray} - {own}:
            raise invalid(
                "--to",
                f"the folder {self.path} has documents of another harvest",
                allowed="a new folder for each harvest",
            )
        partial = own / "partial"
        staged = own / f"unit-{cursor}"
        for earlier in {*own.glob("unit-*")} - {staged}:
            earlier.rmdir()
        if not staged.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            writer = open_store(partial).writer()
            for document, tensors in samples:
                writer.append(f"hs_{document}.safetensors", shard_buffers(tensors, {})[0])
            writer.commit()
            partial.rename(staged)
            sync(own)
        for file in staged.iterdir():
            (self.path / f"{file.name}.lock").touch()  # vLLM's reader locks it
            file.rename(self.path / file.name)
        sync(self.path, self.path.parent)

    def left(self) -> int:
        """Return the number of samples that the trainer has not taken."""
        return sum(1 for _ in self.path.glob("hs_*.safetensors"))


def target_of(to: str, harvest: str) -> TransferFolder:
    """Return the target `file:FOLDER`."""
    kind, _, folder = to.partition(":")
    if kind != "file" or not folder.strip("/"):
        raise invalid("--output", f"{to!r} is no target", allowed="file:FOLDER")
    return TransferFolder(Path(folder), harvest)


def bridge(client: Client, harvest: str, target: TransferFolder, consumer: str, limit: int) -> None:
    """Hand all documents of the stream to the target, at all layers of the first hook, while fewer
    than `limit` samples wait there; acknowledge each unit as soon as its files are durable.
    """
    while True:
        page = client.harvests.next_units(harvest, consumer=consumer, wait=LONGEST_S)
        if page.units:
            while target.left() >= limit:
                time.sleep(PAUSE_S)
            unit = StreamedUnit(page.units[0], page.uri)
            sites = [*unit.shards[0].sites] if unit.shards else []
            layers = [layer for hook, layer in sites if hook == sites[0][0]]
            target.put(unit.cursor, documents(unit.shards, sites[0][0], layers) if sites else [])
            client.harvests.acknowledge(harvest, unit.cursor, consumer=consumer)
        if page.ended:
            return
