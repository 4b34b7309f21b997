"""Request-independent state of a rank: tensors, named modules, global steering.

Requests name tensors by content and bring global steering in their own specs, so nothing here
changes what a request does. Modules and global steering are kept so that ranks can be compared,
tensors in use stay, and everyone's rows stay written. Calls come one at a time; a rollback undoes
the last change, or nothing if that change was refused.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ....schemas.base.tensors import Tensor
from ....schemas.requests.specs import MAX_STEERING_ROWS, SteeringRow, steering_rows
from ....schemas.requests.steering import GlobalSteering
from ..hooks.sites import Site
from .actions import ActionLedger
from .steering_tables import AnyTable, HeldRows, VectorStore


class Named(NamedTuple):
    """Content of a named module."""

    digest: str
    tensors: tuple[str, ...]


_NOTHING = Named("", ())


class RankState:
    """One per rank.

    Its methods raise LookupError, ValueError or RuntimeError for what this rank refuses, and change
    nothing then.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        num_layers: int,
        table: AnyTable,
        actions: ActionLedger,
        step: Callable[[], int],
    ) -> None:
        """`num_layers`: of the whole model, of which this stage has some.

        `step`: the engine step now.
        """
        self._hooks = list(dict.fromkeys(site.hook for site in sites))
        self._num_layers = num_layers
        self._table, self._held_rows, self._actions, self._step = (
            table,
            HeldRows(table, actions),
            actions,
            step,
        )
        self.vectors: VectorStore = table.vectors
        self.steering = GlobalSteering()
        self._rows: list[tuple[int, SteeringRow]] = []  # that stay written for it
        self._modules: dict[str, Named] = {}
        #: The last change, which a rollback may name, and what was before it.
        self._changed: tuple[object, GlobalSteering | Named] | None = None

    @property
    def modules(self) -> dict[str, str]:
        """Name → digest."""
        return {name: named.digest for name, named in sorted(self._modules.items())}

    # --- Tensors

    def put_vectors(self, vectors: dict[str, Tensor]) -> None:
        """Keep tensors by content hash; all or none."""
        added: list[str] = []
        try:
            for name, tensor in sorted(vectors.items()):
                if name not in self.vectors:
                    self.vectors.put(name, tensor)
                    added.append(name)
        except ValueError:
            for name in added:
                self.vectors.drop(name)
            raise

    def drop_vectors(self, names: Sequence[str]) -> None:
        """Forget tensors, also as the rollback of a `put_vectors` that failed elsewhere; none when
        one of them is needed.

        Having a tensor is not an action: its use is accounted for, by content, when a row is
        written. Requests that are steered with it already have their rows.
        """
        needed = {name: "global steering" for name in self.steering.tensors}
        needed |= {
            name: f"module {module!r}"
            for module, named in self._modules.items()
            for name in named.tensors
        }
        for name in names:
            if name in needed:
                raise RuntimeError(f"vector {name[:12]} is needed by {needed[name]}")
        for name in names:
            self.vectors.drop(name)

    # --- Modules

    def set_module(self, name: str, digest: str, tensors: Sequence[str]) -> None:
        """Point `name` at this content; with an empty digest, at nothing."""
        self._changed = None
        for tensor in tensors:
            if tensor not in self.vectors:
                raise LookupError(f"module {name!r}: vector {tensor[:12]} is not on this rank")
        former = self._point(name, Named(digest, tuple(tensors)))
        self._actions.fold(
            self._step(), "module_register" if digest else "module_unregister", name, digest
        )
        self._changed = (name, digest), former

    def rollback_module(self, name: str, digest: str) -> None:
        """Restore `name` as it was before `set_module(name, digest, …)`, if that was the last
        change here.
        """
        former = self._undo((name, digest))
        if isinstance(former, Named):
            self._point(name, former)
            self._actions.fold(self._step(), "module_rollback", name, former.digest)

    def _point(self, name: str, named: Named) -> Named:
        """Return what `name` pointed at until now."""
        former = self._modules.pop(name, _NOTHING)
        if named.digest:
            self._modules[name] = named
        return former

    # --- Sites

    def check_sites(self, hook: str, layers: Sequence[int]) -> None:
        """Raises ValueError for what the model does not have.

        (Sites that other stages have are not an error of this one.)

        What was accepted fits the model that was published last; a worker with other hooks or
        layers must not skip it silently.
        """
        if hook not in self._hooks:
            raise ValueError(f"unknown hook {hook}; valid: {', '.join(self._hooks)}")
        for layer in (min(layers), max(layers)):
            if not 0 <= layer < self._num_layers:
                raise ValueError(
                    f"layer {layer} is out of range: the model has layers 0 to "
                    f"{self._num_layers - 1}"
                )

    # --- Global steering

    def prepare_global(self, steering: GlobalSteering) -> None:
        """Check that this could be committed: tensors, shapes, sites and sums. Changes nothing."""
        for entry in steering.entries:
            self.check_sites(entry.hook, entry.layers)
        rows = steering.standing_rows()
        if len(rows) > MAX_STEERING_ROWS:
            raise ValueError(
                f"it takes {len(rows)} rows of the steering table; the limit is {MAX_STEERING_ROWS}"
            )
        # Positions that are listed are cut to each prompt; alone each of these entries must be
        # possible.
        listed = [
            steering_rows([entry.stored([0])])[0]
            for entry in steering.entries
            if isinstance(entry.positions, list)
        ]
        for row in rows + listed:
            self._table.prepared.get(row)

    def commit_global(self, steering: GlobalSteering) -> None:
        """Make it the global steering: its rows stay written until the next commit.

        New rows are acquired before old ones are released.
        """
        self._changed = None
        former = self._switch(steering)
        self._actions.fold(
            self._step(),
            "global_set" if steering.entries else "global_clear",
            steering.version,
            steering.digest,
        )
        self._changed = steering.version, former

    def rollback_global(self, version: int) -> None:
        """Restore global steering as it was before `version` was committed, if that was the last
        change here.
        """
        former = self._undo(version)
        if isinstance(former, GlobalSteering):
            self._switch(former)
            self._actions.fold(self._step(), "global_rollback", version, former.digest)

    def _switch(self, steering: GlobalSteering) -> GlobalSteering:
        """Return what was everyone's until now."""
        rows = self._held_rows.acquire(self._step(), steering.standing_rows())
        self._held_rows.release(self._step(), self._rows)
        former, self.steering, self._rows = self.steering, steering, rows
        return former

    # --- All

    def _undo(self, change: object) -> GlobalSteering | Named | None:
        """The state before `change`, if that was the last one; it can be undone once."""
        if self._changed is None or self._changed[0] != change:
            return None
        former, self._changed = self._changed[1], None
        return former

    def forget(self) -> None:
        """Drop everything; the table's rows are dropped by the caller that clears the table."""
        self.vectors.clear()
        self._modules.clear()
        self.steering, self._rows, self._changed = GlobalSteering(), [], None

    def names(self) -> tuple[list[str], list[tuple[str, Named]], int, str]:
        """All state except the rows."""
        return (
            self.vectors.names(),
            sorted(self._modules.items()),
            self.steering.version,
            self.steering.digest,
        )
