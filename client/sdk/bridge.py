"""Hands the documents of a harvest's stream to a trainer as `hs_connectors` and vLLM's
hidden-states connector do: as files, or through a Mooncake store over TCP or RDMA.

A document is a sample: `hidden_states` `[tokens, layers, hidden]`, `token_ids` and `loss_mask`. A
trainer takes a sample by deleting it.
"""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...schemas.base import invalid, to_json
from ...storage.file_store import sync
from ...storage.harvests import StreamedUnit, shard_buffers
from ...storage.store import open_store
from ..harvest.exports import NamedBits, documents
from .client import Client

#: Seconds between two looks at what a trainer has taken; and for which a unit is waited for.
PAUSE_S, LONGEST_S = 0.1, 25.0
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
        partial, staged = own / "partial", own / f"unit-{cursor}"
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

    def left(self) -> list[int]:
        """Return the cursors of samples that the trainer has not taken; 0 for those that this
        process need not hold.
        """
        return [0 for _ in self.path.glob("hs_*.safetensors")]


class Mooncake:
    """Objects `<harvest>-<document>` in a Mooncake store, which live as long as this process.

    Prints for each, as a line of JSON, the parameters with which `MooncakeTransfer` of
    hs_connectors gets it.
    """

    def __init__(self, harvest: str, address: str, protocol: str) -> None:
        from hs_connectors import mooncake_store as code

        config = code.MooncakeStoreConfig(master_server_address=address, protocol=protocol)
        self._code, self._harvest = code, harvest
        self._store = code.MooncakeHiddenStatesStore(config).setup()
        self._offered: dict[str, int] = {}  # handle → cursor of its unit

    def put(self, cursor: int, samples: Samples) -> None:
        from safetensors.torch import load

        for document, arrays in samples:
            tensors = load(b"".join(shard_buffers(arrays, {})[0]))
            specs, size = self._code.packed_layout(
                {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            )
            handle = f"{self._harvest}-{document}"
            manifest = {
                "handle": handle,
                "version": self._code.VERSION,
                "tensors": specs,
                "metadata": {"num_tokens": len(tensors["token_ids"]), "total_aligned_bytes": size},
            }
            self._store.delete_sample(handle)
            self._store.put_sample(manifest, tensors)
            self._offered[handle] = cursor
            print(to_json(manifest).decode(), flush=True)

    def left(self) -> list[int]:
        self._offered = {
            name: cursor
            for name, cursor in self._offered.items()
            if self._store._require_store().is_exist(name) == 1
        }
        return list(self._offered.values())


def target_of(to: str, harvest: str) -> TransferFolder | Mooncake:
    """Return the target `file:FOLDER`, `tcp://MASTER:PORT` or `rdma://MASTER:PORT`."""
    kind, _, place = to.partition(":")
    if kind not in ("file", "tcp", "rdma") or not place.strip("/"):
        raise invalid(
            "--output",
            f"{to!r} is no target",
            allowed="file:FOLDER, tcp://HOST:PORT, rdma://HOST:PORT",
        )
    return (
        TransferFolder(Path(place), harvest)
        if kind == "file"
        else Mooncake(harvest, place[2:], kind)
    )


def bridge(
    client: Client, harvest: str, target: TransferFolder | Mooncake, consumer: str, limit: int
) -> None:
    """Hand all documents of the stream to the target, at all layers of the first hook, while fewer
    than `limit` samples wait there; acknowledge units that are safe.
    """
    after, offered = None, list[int]()
    while True:
        page = client.harvests.next_units(
            harvest, consumer=consumer, after=after, wait=PAUSE_S if offered else LONGEST_S
        )
        for entry in page.units[:1]:
            while len(target.left()) >= limit:
                time.sleep(PAUSE_S)
            unit = StreamedUnit(entry, page.uri)
            sites = [site for shard in unit.shards[:1] for site in shard.sites]
            layers = [layer for hook, layer in sites if hook == sites[0][0]]
            target.put(unit.cursor, documents(unit.shards, sites[0][0], layers) if sites else [])
            offered.append(after := unit.cursor)
        while offered and offered[0] not in target.left():
            client.harvests.acknowledge(harvest, offered.pop(0), consumer=consumer)
        if page.ended and not offered:
            return
        time.sleep(0 if page.units else PAUSE_S)
