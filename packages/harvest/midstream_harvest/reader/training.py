"""Reads harvests in PyTorch: a dataset of rows, and a stream of activations for SAE trainers.

Its dataset derives from PyTorch's class, so that the package imports this module only when it is
used.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..files.shards import Harvest, HookLayer, Shard, open as open_harvest, site_name

#: The default number of shards that are shuffled together.
MIXED = 4


class RowDataset(IterableDataset[Any]):
    """Yields batches of rows in an order that depends on seed and epoch: shards in random order,
    with the rows of every `mixed` consecutive shards shuffled together.

    An item is a tensor `[batch_size, width]`, or for several sites a dict `<hook>.<layer>` →
    tensor; with `keys=True`, always a dict that also has `document`, `position` and `token_id`. Use
    `DataLoader(dataset, batch_size=None, num_workers=…)`. Loader workers, and the `replicas` of a
    distributed training, get different shards. `state_dict` and `load_state_dict` let a torchdata
    `StatefulDataLoader` resume; with a plain loader, set `start` to the number of batches already
    consumed.
    """

    def __init__(
        self,
        uri: str,
        sites: Sequence[HookLayer] | None = None,
        *,
        batch_size: int = 1024,
        seed: int | None = 0,
        epoch: int = 0,
        mixed: int = MIXED,
        keys: bool = False,
        dtype: torch.dtype | None = None,
        replica: int = 0,
        replicas: int = 1,
        start: int = 0,
    ) -> None:
        """Open the harvest. `seed`: None keeps the order of the harvest.

        `dtype`: that of the returned rows; None: float16 if they are stored as float16, else
        float32.
        """
        self.harvest: Harvest = open_harvest(uri)
        self.sites = [self.harvest.site(*site) for site in sites] if sites else self.harvest.sites
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = epoch
        self.mixed = mixed
        self.keys = keys
        self.dtype = dtype
        self.replica = replica
        self.replicas = replicas
        self.start = start
        self._yielded = 0  # batches of this iteration, in this process
        self._resume: int | None = None

    def __len__(self) -> int:
        """Return the number of this replica's batches if it is read without loader workers."""
        return sum(-(-sum(map(len, group)) // self.batch_size) for group in self._groups(0, 1))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self._resume = state["given"]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        skip = (
            self._resume
            if self._resume is not None
            else max(0, -(-(self.start - worker) // workers))
        )
        self._resume = None
        self._yielded = 0
        for number, group in enumerate(self._groups(worker, workers)):
            batches = -(-sum(map(len, group)) // self.batch_size)
            if skip >= batches:
                skip -= batches
                self._yielded += batches
                continue
            yield from self._batches(group, number * workers + worker, skip)
            skip = 0

    def _groups(self, worker: int, workers: int) -> list[list[Shard]]:
        """Return this worker's shards, in groups that are shuffled together."""
        shards = [shard for shard in self.harvest.shards if len(shard)]
        if self.seed is not None:
            order = np.random.Generator(np.random.PCG64([self.seed, self.epoch])).permutation(
                len(shards)
            )
            shards = [shards[place] for place in order]
        shards = shards[self.replica :: self.replicas][worker::workers]
        size = self.mixed if self.seed is not None else 1
        return [shards[at : at + size] for at in range(0, len(shards), size)]

    def _batches(self, group: Sequence[Shard], number: int, skip: int) -> Iterator[Any]:
        tensors = {site_name(*site): _rows(group, site) for site in self.sites}
        if self.keys:
            parts = [shard.keys() for shard in group]
            for place, name in enumerate(("document", "position", "token_id")):
                tensors[name] = torch.from_numpy(np.concatenate([part[place] for part in parts]))
        for shard in group:
            shard.close()
        count = len(next(iter(tensors.values())))
        order = torch.arange(count)
        if self.seed is not None:
            generator = np.random.Generator(
                np.random.PCG64([self.seed, self.epoch, 1, self.replica, number])
            )
            order = torch.from_numpy(generator.permutation(count))
        self._yielded += skip
        for at in range(skip * self.batch_size, count, self.batch_size):
            chosen = order[at : at + self.batch_size]
            # Convert only now: the stored dtype usually takes half the memory of float32.
            batch = {name: self._converted(values[chosen]) for name, values in tensors.items()}
            self._yielded += 1
            yield batch if self.keys or len(batch) > 1 else next(iter(batch.values()))

    def _converted(self, values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return values
        return values.to(
            self.dtype or (torch.float16 if values.dtype == torch.float16 else torch.float32)
        )


def _rows(group: Sequence[Shard], site: HookLayer) -> torch.Tensor:
    """Return all rows of these shards in their stored dtype, or float32 if the dtype has scales."""
    rows = np.concatenate([shard.stored(*site) for shard in group])
    if rows.dtype != np.uint16:
        return torch.from_numpy(rows)
    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)


def activations(
    uri: str,
    layer: int | None = None,
    hook: str | None = None,
    *,
    batch_size: int = 4096,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[torch.Tensor]:
    """Yield float32 `[batch_size, width]` of one site, epoch after epoch, without end: a data
    provider for SAELens' `SAETrainer`.
    """
    epoch = 0
    while True:
        dataset = RowDataset(
            uri,
            [open_harvest(uri).site(hook, layer)],
            batch_size=batch_size,
            seed=seed,
            epoch=epoch,
            dtype=torch.float32,
        )
        if not len(dataset):
            raise ValueError(f"the harvest {uri} has no rows")
        small = len(dataset.harvest) < batch_size
        for batch in dataset:
            # a group's last, smaller batch would make a noisy training step
            if len(batch) == batch_size or small:
                yield batch.to(device)
        epoch += 1
