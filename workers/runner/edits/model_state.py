"""Request-independent state of a rank: tensors, named modules, global steering.

Requests name tensors by content hash and bring global steering in their own specs, so this state
changes no request. Modules and global steering are kept so that ranks can be compared, so that
tensors in use are not dropped, and so that the rows of global steering stay in the table. Calls
come one at a time; a rollback undoes the last change, or nothing if that change was refused.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ....schemas.base.tensors import Tensor
from ....schemas.requests.specs import MAX_STEERING_ROWS, SteeringRow, steering_rows
from ....schemas.requests.steering import GlobalSteering
from ..base.actions import ActionLedger
from ..hooks.sites import Site
from .steering_tables import Tables


class Named(NamedTuple):
    """Content of a named module."""

    digest: str
    tensors: tuple[str, ...]


_NOTHING = Named("", ())


class RankState:
    """State of one rank.

    Methods raise LookupError, ValueError or RuntimeError to refuse a change, and then change
    nothing.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        num_layers: int,
        table: Tables,
        actions: ActionLedger,
        step: Callable[[], int],
    ) -> None:
        """`num_layers`: layers of the whole model, of which this stage holds some.

        `step` returns the number of the current engine step.
        """
        self._hooks = list(dict.fromkeys(site.hook for site in sites))
        self._num_layers = num_layers
        self._table, self._actions, self._step = table, actions, step
        self.vectors = table.vectors
        self.steering = GlobalSteering()
        self._rows: list[tuple[int, SteeringRow]] = []  # rows of global steering, kept in the table
        self._modules: dict[str, Named] = {}
        #: The last change, which a rollback may name, and the state before it.
        self._changed: tuple[object, GlobalSteering | Named] | None = None

    @property
    def modules(self) -> dict[str, str]:
        """Return module name → digest."""
        return {name: named.digest for name, named in sorted(self._modules.items())}

    # --- Tensors

    def put_vectors(self, vectors: dict[str, Tensor]) -> None:
        """Store tensors by content hash: all of them, or none if one is refused."""
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
        """Drop tensors; none of them if one is needed. Also rolls back a `put_vectors` that failed
        on another rank.

        Storing a tensor is not recorded in the action ledger; writing a row that contains it is.
        Requests that are steered with it already have their rows.
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
        """Set the content of module `name`; an empty digest removes the module."""
        self._changed = None
        for tensor in tensors:
            if tensor not in self.vectors:
                raise LookupError(f"module {name!r}: vector {tensor[:12]} is not on this rank")
        previous = self._point(name, Named(digest, tuple(tensors)))
        self._actions.fold(
            self._step(), "module_register" if digest else "module_unregister", name, digest
        )
        self._changed = (name, digest), previous

    def rollback_module(self, name: str, digest: str) -> None:
        """Restore `name` as it was before `set_module(name, digest, …)`, if that was the last
        change here.
        """
        previous = self._undo((name, digest))
        if isinstance(previous, Named):
            self._point(name, previous)
            self._actions.fold(self._step(), "module_rollback", name, previous.digest)

    def _point(self, name: str, named: Named) -> Named:
        """Set what `name` means; return what it meant before."""
        previous = self._modules.pop(name, _NOTHING)
        if named.digest:
            self._modules[name] = named
        return previous

    # --- Sites

    def check_sites(self, hook: str, layers: Sequence[int]) -> None:
        """Raises ValueError for a hook or layer that the model does not have; sites of other stages
        are valid.

        The API accepts requests for the model that was published last; a worker with other hooks or
        layers must not skip an edit silently.
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
        """Check whether `commit_global` could succeed: tensors, shapes, sites and sums. Changes
        nothing.
        """
        for entry in steering.entries:
            self.check_sites(entry.hook, entry.layers)
        rows = steering.standing_rows()
        if len(rows) > MAX_STEERING_ROWS:
            raise ValueError(
                f"it takes {len(rows)} rows of the steering table; the limit is {MAX_STEERING_ROWS}"
            )
        # A short prompt may have the listed positions of one entry only, so check each one alone.
        listed = [
            steering_rows([entry.stored([0])])[0]
            for entry in steering.entries
            if isinstance(entry.positions, list)
        ]
        for row in rows + listed:
            self._table.prepared.get(row)

    def commit_global(self, steering: GlobalSteering) -> None:
        """Make `steering` the global steering: its rows stay in the table until the next commit.

        New rows are acquired before old ones are released.
        """
        self._changed = None
        previous = self._switch(steering)
        self._actions.fold(
            self._step(),
            "global_set" if steering.entries else "global_clear",
            steering.version,
            steering.digest,
        )
        self._changed = steering.version, previous

    def rollback_global(self, version: int) -> None:
        """Restore global steering as it was before `version` was committed, if that was the last
        change here.
        """
        previous = self._undo(version)
        if isinstance(previous, GlobalSteering):
            self._switch(previous)
            self._actions.fold(self._step(), "global_rollback", version, previous.digest)

    def _switch(self, steering: GlobalSteering) -> GlobalSteering:
        """Replace the global steering; return the previous one."""
        rows = self._table.acquire(self._step(), steering.standing_rows())
        self._table.release(self._step(), self._rows)
        previous, self.steering, self._rows = self.steering, steering, rows
        return previous

    # --- All state

    def _undo(self, change: object) -> GlobalSteering | Named | None:
        """Return the state before `change`, once, if that was the last change; else None."""
        if self._changed is None or self._changed[0] != change:
            return None
        previous, self._changed = self._changed[1], None
        return previous

    def forget(self) -> None:
        """Drop all state. The caller also clears the table, which drops its rows."""
        self.vectors.clear()
        self._modules.clear()
        self.steering, self._rows, self._changed = GlobalSteering(), [], None

    def names(self) -> tuple[list[str], list[tuple[str, Named]], int, str]:
        """Return all state except the rows, to compare ranks."""
        return (
            self.vectors.names(),
            sorted(self._modules.items()),
            self.steering.version,
            self.steering.digest,
        )
