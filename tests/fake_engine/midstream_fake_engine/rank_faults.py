"""Faults of a vLLM rank: `name` or `name:rank=1` in `MIDSTREAM_FAULT`, several separated by commas.

vLLM loads `install` as a plugin in each of its processes (see the entry point beside this package).
Where the setting is not empty, the ranks' class is one that can be made to fail; with `rpc`, faults
may be switched while the engine runs, by the call `midstream_fault`.
"""

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from midstream.schemas.prompts.selectors import HOOKS, Hook

WORKER = "midstream.workers.runner.vllm.worker_class.MidstreamWorker"

#: Calls of the worker; under its name each can be made to fail on a rank, before it does anything.
CALLS = (
    "put_vectors",
    "drop_vectors",
    "put_run",
    "drop_runs",
    "put_lora",
    "drop_loras",
    "put_sae",
    "drop_saes",
    "check_global",
    "restart_ledger",
    "forget_failures",
)

#: What can be made to fail, and what then happens.
KNOWN = {
    **dict.fromkeys(CALLS, "the call fails on this rank"),
    "admit": "applying a request's steering fails on this rank",
    "skip_action": (
        "the next action, and only that one, is left out on this rank: a row stays "
        "empty, and the action is not recorded"
    ),
    "alter_action": (
        "the next action, and only that one, is replaced on this rank: a row gets other vectors"
    ),
    "lose_run": "the next look-up of a source run's row finds nothing on this rank",
    "write": "writing a capture raises OSError",
    "reading": "computing a reading of captured rows fails",
    "hold_write": "no group of captures is written while the data directory has a file `hold`",
    "slow_write": "writing a group of captures takes a second longer",
    "swap_lora": "the next step's rows are taken for another adapter's",
    "alter_score": (
        "the probes' scores of the next step in which there are any are wrong on this rank"
    ),
    "lose_score": "scoring a step's rows raises",
    "plan": "planning a step raises",
    "skip_site": (
        "in the next step in which a site has something to do, the last such site does "
        "not run on this rank"
    ),
    "commit": "putting a step's plan where the forward pass reads it raises",
    "lose_law": "the certification's call of an MLP raises on this rank",
    "settle": "reading which rows are not finite raises",
    "crash": "the process dies at a crash point: `schemas.settings.faults`",
    "rpc": "faults may be switched while the engine runs",
}

#: Wrong adapters, of one hook each: what the certification run must refuse.
KNOWN |= {
    f"{wrong}_{hook}": what
    for hook in HOOKS
    for wrong, what in {
        "shift": "the hook's rows of each layer are called those of the next",
        "branch": "the hook reads the branch that was added last, not the stream",
        "half": "the hook reads one tensor of the pair whose sum it is",
    }.items()
}
#: What is read instead: the first that the layer has.
_ADDED: dict[Hook, tuple[Hook, ...]] = {
    "pre_attn": ("mlp_in", "attn_out"),
    "post_attn": ("attn_out",),
    "post_block": ("mlp_out", "attn_out"),
}
_SLOW_S = 1.0


class Faults:
    """The active faults of one rank."""

    def __init__(self, text: str, rank: int) -> None:
        self._rank = rank
        self._active: set[str] = set()
        self._add(text)

    def switch(self, text: str) -> None:
        """Replace the active faults; raises RuntimeError unless booted with `rpc`."""
        if "rpc" not in self._active:
            raise RuntimeError("this rank was not started with fault injection")
        self._active = {"rpc"}
        self._add(text)

    def _add(self, text: str) -> None:
        for fault in filter(None, text.split(",")):
            name, _, condition = fault.partition(":")
            if name not in KNOWN:
                raise ValueError(f"unknown fault {name!r}; known: {', '.join(KNOWN)}")
            if condition in ("", f"rank={self._rank}"):
                self._active.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._active

    def once(self, name: str) -> bool:
        """Return whether the fault is active; the call consumes it."""
        active = name in self._active
        self._active.discard(name)
        return active

    def check(self, name: str, kind: type[Exception] = RuntimeError) -> None:
        """Raise if the fault is active."""
        if name in self:
            raise kind(f"fault injected: {name}")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around` called with the original method, and with its arguments."""
    setattr(owner, name, functools.partial(around, getattr(owner, name)))


def inject(plane: Any, faults: Faults) -> None:
    """Make a rank's data plane fail where `faults` say so, from now on."""
    from midstream.workers.runner.plane.step_edits import EditsPart

    banks = plane.banks
    wrap_ledger(plane.actions, faults)
    wrap_writer(plane._delivery._near.desk.writer, faults)
    wrap_runs(plane.runs, faults)
    wrap(plane.readings, "_read", functools.partial(_read, faults))
    wrap(plane.probes, "_put", functools.partial(_put, faults))
    wrap(banks.table.prepared, "get", functools.partial(_content, faults, banks.table))
    wrap(banks, "plan_capture", functools.partial(_plan, faults))
    wrap(banks, "commit", functools.partial(_commit, faults, banks))
    wrap(banks.first.planner, "commit", functools.partial(_commit_first, faults))
    wrap(banks, "settle", functools.partial(_settle, faults))
    wrap(banks, "take", functools.partial(_take, faults))
    edits = next(part for part in plane._parts if isinstance(part, EditsPart))
    edits._rows = copy.copy(edits._rows)  # global steering has the same tables
    wrap(edits._rows, "acquire", functools.partial(_acquire, faults))
    if plane.loras is not None:
        wrap(plane.loras, "used", functools.partial(_used, faults))


def wrap_ledger(ledger: Any, faults: Faults) -> None:
    """Faults of `ActionLedger.fold`."""

    def fold(original: Callable[..., None], step: int, kind: str, *content: str | int) -> None:
        if faults.once("skip_action"):
            return
        altered = faults.once("alter_action")
        original(step, kind, *content[:-1], f"{content[-1]}, altered" if altered else content[-1])

    wrap(ledger, "fold", fold)


def wrap_runs(runs: Any, faults: Faults) -> None:
    """Faults of `RunStore`."""

    def find(original: Callable[..., Any], key: str, hook: str, layer: int) -> Any:
        if key in runs and faults.once("lose_run"):
            raise LookupError(f"source run {key} is not on this rank")
        return original(key, hook, layer)

    wrap(runs, "_find", find)


def _hold_of(writer: Any) -> Path:
    """The file that holds the writer's captures back while it exists."""
    folder: Path = writer._outbox.store.path.parents[1]
    return folder / "hold"


def wrap_writer(writer: Any, faults: Faults) -> None:
    """Faults of `Writer`."""
    from midstream.workers.runner.files.consumers import placing
    from midstream.workers.runner.files.finished_rows import Outcome

    def action(original: Callable[..., Any], name: str, consumers: Any) -> Any:
        if writer._diverted is None and name in ("filesystem", *placing()):
            while "hold_write" in faults and _hold_of(writer).exists():
                time.sleep(0.01)
            if "slow_write" in faults:
                time.sleep(_SLOW_S)
            if "write" in faults:
                error = "write failed: fault injected: write"
                return lambda captures: (
                    [Outcome(error=error, unavailable=name in placing())] * len(captures)
                )
        return original(name, consumers)

    wrap(writer, "_action", action)


def _read(faults: Faults, original: Callable[..., bytes], capture: Any) -> bytes:
    from midstream.workers.runner.files.finished_rows import ReadingError

    faults.check("reading", ReadingError)
    return original(capture)


def _put(faults: Faults, original: Callable[..., None], due: list[int]) -> None:
    from midstream.workers.runner.plane import probe_scores

    if not due:
        return
    faults.check("lose_score")
    products = probe_scores._products
    wrong = np.float32(faults.once("alter_score"))

    def shifted(*given: Any) -> Any:
        return products(*given) + wrong if wrong else products(*given)

    with mock.patch.object(probe_scores, "_products", shifted):
        original(due)


def _content(faults: Faults, tables: Any, original: Callable[..., Any], row: Any) -> Any:
    """What is written to the table instead of a row's content."""
    joined = original(row)
    table = tables.of(row)
    if "skip_action" in faults:  # the ledger, which is called next, consumes it
        return table._join({})
    if len(joined.runs) and faults.once("alter_action"):
        content = table.content(row)
        return table._join(
            {place: (-vectors, scalars) for place, (vectors, scalars) in content.items()}
        )
    return joined


def _plan(faults: Faults, original: Callable[..., None], *args: Any) -> None:
    faults.check("plan")
    original(*args)


def _commit_first(faults: Faults, original: Callable[[], None]) -> None:
    from midstream.workers.runner.base.shared_memory import HostMemoryError

    faults.check("commit", HostMemoryError)
    original()


def _commit(faults: Faults, banks: Any, original: Callable[[], None]) -> None:
    original()
    if banks.busy and faults.once("skip_site"):
        _lose_site(next(bank for bank in banks._banks if bank.planner.due))


def _lose_site(bank: Any) -> None:
    """The last site with something to do in the next forward does not run."""
    from midstream.kernels import plan as columns

    work = [columns.EDITS, columns.BEFORE.COUNT, columns.AFTER.COUNT]
    last = np.flatnonzero(bank.planner._plan[:, work].any(axis=1))[-1]
    bank.table._buffers.plan[last, work] = 0


def _settle(faults: Faults, original: Callable[..., Any], needed: Any = None) -> Any:
    if needed is None:
        faults.check("settle")
    return original(needed)


def _take(faults: Faults, original: Callable[..., None], *args: Any) -> None:
    original(*args)
    faults.check("settle")  # on a CPU this is where they are read


def _acquire(faults: Faults, original: Callable[..., Any], step: int, needed: Any) -> Any:
    if needed:
        faults.check("admit")
    return original(step, needed)


def _used(faults: Faults, original: Callable[..., str], *args: Any) -> str:
    return "another" if faults.once("swap_lora") else original(*args)


# -- the rank's class
# --------------------------------------------------------------------------------------------------


class FaultyRank:
    """Mixed in front of `MidstreamWorker`."""

    rank: int
    midstream_faults: Faults

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        from midstream.workers.runner.base.config import plane_config
        from midstream.workers.runner.certificate import module_laws
        from midstream.workers.runner.rows import delivery
        from midstream.workers.runner.vllm import worker_class

        module: Any = worker_class  # whose imports are replaced
        faults = self.midstream_faults = Faults(plane_config().fault, self.rank)
        complete = module.complete
        install_sites = module.install
        make_plane = module.DataPlane
        if "lose_law" in faults:
            wrap(module_laws.ModuleLaws, "mlp", lambda *_: faults.check("lose_law"))

        def completed(*args: Any, **kwargs: Any) -> Any:
            return misplaced(complete(*args, **kwargs), faults)

        def installed(model: Any, adapter: Any, *args: Any, **kwargs: Any) -> Any:
            sites, buffers = install_sites(model, adapter, *args, **kwargs)
            mislabelled(sites, adapter.num_layers, faults)
            return sites, buffers

        def made(*args: Any, **kwargs: Any) -> Any:
            plane = make_plane(*args, **kwargs)
            inject(plane, faults)
            return plane

        with (
            mock.patch.multiple(module, complete=completed, install=installed, DataPlane=made),
            mock.patch.object(delivery, "PROGRAM", "midstream_fake_engine.rowd_faults"),
        ):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def midstream_fault(self, text: str) -> tuple[bool, str]:
        """Switch the faults."""
        from midstream.workers.runner.base.config import plane_config

        self.midstream_faults.switch(text)
        told(plane_config(), self.rank).write_text(text)
        return True, ""


def told(config: Any, rank: int) -> Path:
    """The file with the faults of the process that writes a rank's files."""
    return Path(config.outbox_dir) / f"{config.worker}-{rank}.faults"


def _failing(call: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if call in self.midstream_faults:
            return False, f"fault injected: {call}"
        return getattr(super(FaultyRank, self), f"midstream_{call}")(*args)

    return method


for _call in CALLS:
    setattr(FaultyRank, f"midstream_{_call}", _failing(_call))


def misplaced(adapter: Any, faults: Faults) -> Any:
    """The adapter, with the taps that faults make wrong."""

    def wrong(variant: Any) -> Any:
        taps = dict(variant.taps)
        for hook, tap in variant.taps.items():
            if f"branch_{hook}" in faults and (
                branch := next((item for item in _ADDED[hook] if item in taps), None)
            ):
                taps[hook] = variant.taps[branch]
            elif f"half_{hook}" in faults:
                taps[hook] = replace(tap, kind="single")
        return replace(variant, taps=taps, measured=variant.laws)

    if not any(f"{name}_{hook}" in faults for name in ("branch", "half") for hook in HOOKS):
        return adapter
    return replace(
        adapter,
        variant=wrong(adapter.variant),
        kinds={layer: wrong(kind) for layer, kind in adapter.kinds.items()},
    )


def mislabelled(sites: Any, num_layers: int, faults: Faults) -> None:
    """Call the rows of a hook, where a fault says so, those of the next layer."""
    for site in sites:
        if f"shift_{site.hook}" in faults:
            site.layer = (site.layer + 1) % num_layers


def faulty(worker: Any) -> Any:
    """The worker's class, as one that can fail."""
    if issubclass(worker, FaultyRank):
        return worker
    return type("FaultyWorker", (FaultyRank, worker), {})


def install() -> None:
    """Have vLLM make ranks of the class that can fail, where the setting `fault` names any."""
    from vllm.v1.worker import worker_base

    resolve = worker_base.resolve_obj_by_qualname
    if getattr(resolve, "faulty", False):
        return

    def resolved(name: str) -> Any:
        from midstream.workers.runner.base.config import plane_config

        found = resolve(name)
        return faulty(found) if name == WORKER and plane_config().fault else found

    resolved.faulty = True  # type: ignore[attr-defined]
    worker_base.resolve_obj_by_qualname = resolved
