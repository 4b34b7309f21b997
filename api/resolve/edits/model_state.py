"""State of a model that requests can refer to: modules and source runs."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.named.source_runs import LedgerRuns
from ....schemas.access.keys import Caller, shown
from ....schemas.base.errors import MidstreamError, invalid, unknown
from ....schemas.base.records import by_key, fields_of
from ....schemas.prompts.selectors import FORWARD, Hook
from ....schemas.requests.policies import Policy
from ....schemas.requests.source_runs import RunPrompt, RunRecord, RunState, RunView
from ....schemas.requests.specs import PatchSpec
from ....schemas.requests.steering import Module
from .features import NONE, NamedFeatures


@dataclass(frozen=True)
class ModelState:
    """Snapshot of a model's state: the modules and runs that the request names and that exist."""

    modules: Mapping[str, Module] = field(default_factory=dict)
    names: Sequence[str] = ()  # of all modules, if a requested one does not exist
    # by what the request calls them: a name, or a job's id
    runs: Mapping[str, RunView] = field(default_factory=dict)
    run_names: Sequence[str] = ()  # of all runs, if a requested one does not exist
    features: NamedFeatures = NONE  # that steering names
    #: Policies of all traffic that refuse edits which hide a request from them.
    guards: Sequence[Policy] = ()

    # A request that knows the probe's direction could take it out before the site, and put it back
    # after. Scoring a second, unedited row would take a second forward pass.
    def check_seen(self, at: str, hook: Hook, layers: Sequence[int]) -> None:
        """Raises a 400 for an edit of the request's own, in the field `at`, that changes the rows
        which a policy of all traffic reads: at its probe's site or before it.
        """
        edited = min(layers), FORWARD.index(hook)
        for name, read in ((guard.name, guard.current.probe.content) for guard in self.guards):
            if edited <= (read.layer, FORWARD.index(read.hook)):
                raise invalid(
                    at,
                    f"edits {hook} of layer {edited[0]}, and so the rows that the policy {name!r} "
                    f"of all traffic reads: {read.hook} of layer {read.layer}",
                    allowed="sites after that one, in the order of the forward pass",
                )


NOTHING = ModelState()


async def find_runs(
    ledger: Ledger, model: str, patch: Sequence[PatchSpec], caller: Caller
) -> dict[str, RunView]:
    """Return the requested runs that exist for the caller, also those of other models, each with
    the requested prompts.
    """
    sources = (spec.source for spec in patch)
    requested = by_key((each.run, each.prompt) for each in sources if each.run is not None)
    runs = LedgerRuns(ledger, caller)

    async def view(name: str) -> RunView | None:
        if (run := await runs.lookup(model, name)) is not None:
            readiness, prompts = await runs.read(run, set(requested[name]))
            return _view(run, readiness.state, readiness.detail, prompts)
        foreign = await _of_another_model(ledger, runs, model, name)
        return None if foreign is None else _view(foreign, "ready", "", None)

    views = await asyncio.gather(*map(view, requested))
    return {name: found for name, found in zip(requested, views, strict=True) if found}


async def _of_another_model(
    ledger: Ledger, runs: LedgerRuns, model: str, name: str
) -> RunRecord | None:
    for info in await ledger.models():
        if info.name != model and (run := await runs.lookup(info.name, name)) is not None:
            return run
    return None


def _view(run: RunRecord, state: RunState, detail: str, prompts: list[RunPrompt] | None) -> RunView:
    own = {"name": shown(run.name), "state": state, "detail": detail, "prompts": prompts}
    return RunView(**fields_of(run, RunRecord) | own)


def unknown_module(
    at: str, name: str | None, model: str, model_state: ModelState
) -> MidstreamError:
    return unknown("module", name, model, model_state.names, field=at, kind="invalid_request")
