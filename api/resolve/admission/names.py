"""Finds what the names in a request refer to: model, modules, source runs, registered artifacts.

Each store is asked once for everything that a request names; what is found is checked without
further questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
import msgspec

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.named.probes import watched_model
from ....broker.ledger.named.registry import NOTHING_FOUND, Lookup, look_up
from ....broker.ledger.named.source_runs import LedgerRuns
from ....schemas.access.keys import Caller, own, scoped, shown
from ....schemas.artifacts.loras import LORAS, StoredLora
from ....schemas.artifacts.probes import PROBES, ProbeUse, StoredProbe
from ....schemas.artifacts.registered import ArtifactKind, NamedArtifact, references
from ....schemas.extensions import Extension
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.policies import POLICIES, Policy
from ....schemas.requests.specs import PatchSpec, SteeringSpec
from ....schemas.requests.steering import MODULES
from ....schemas.settings.settings import Settings
from ..edits.directions import DirectionFiles, check_directed
from ..edits.features import (
    NONE,
    FeatureFiles,
    FeatureVectors,
    NamedFeatures,
    check_range,
    check_specs,
)
from ..edits.loras import named_lora
from ..edits.model_state import NOTHING, ModelState, find_runs
from ..edits.patches import runs_of
from ..edits.steering import modules_named
from ..positions.gates import all_steering
from ..positions.windows import with_trigger_tokens
from ..prompts.request_parsing import ParsedRequest
from ..readings.lens import named_jacobian, single_tokens
from ..readings.probes import NO_POLICIES, Applied, policies_of, probes_of
from ..readings.readings import artifacts_read
from ..readings.saes import named_sae
from .served import Served


@dataclass(frozen=True)
class Referents:
    """Holds what a request names, as found and checked."""

    state: ModelState = NOTHING
    lora: StoredLora | None = None
    probes: Sequence[StoredProbe] = ()
    policies: Applied = NO_POLICIES  # also those of all traffic
    found: Lookup = NOTHING_FOUND  # registered artifacts


NO_NAMES = Referents()


class Names:
    """Finds what requests to a model name. Belongs to one event loop."""

    def __init__(self, settings: Settings, ledger: Ledger, served: Served):
        self._ledger = ledger
        self._served = served
        self._features = FeatureFiles(settings.artifacts_of("saes"))
        self._directions = DirectionFiles(settings.artifacts_of("lenses"))
        self._reading_files = anyio.CapacityLimiter(1)

    async def resolve(
        self,
        parsed: ParsedRequest,
        info: ModelInfo,
        watching: Sequence[str],
        caller: Caller,
    ) -> Referents:
        """Return what the request names. `watching`: the policies of all traffic.

        Raises MidstreamError: a 400 naming the field, or
        `unavailable` for a policy of all traffic that does not fit the model.
        """
        steering = parsed.steering
        patch = parsed.patch
        guards = ((POLICIES, name) for name in watching)
        modules = [(MODULES, scoped(caller.tenant, name)) for name in modules_of(parsed)]
        named = artifacts_of(parsed, info.extensions)
        found = await self.look_up(info, *named, *guards, *modules)
        lora = named_lora(parsed.lora, info, found)
        probes = probes_of(parsed.probes, info, found)
        of_all_traffic = found.present(POLICIES, watching)
        policies = policies_of(parsed, info, found, of_all_traffic)
        state = NOTHING
        if modules or steering or patch:
            state = await self._state(info, caller, found, patch, of_all_traffic)
        features = await self.features(info, steering, found)
        return Referents(replace(state, features=features), lora, probes, policies, found)

    async def look_up(
        self, info: ModelInfo, *named: tuple[ArtifactKind[Any], str | None]
    ) -> Lookup:
        """Return the named artifacts of the model; a name that is None stands for none."""
        return await look_up(self._ledger, info.name, references(*named))

    async def state(self, info: ModelInfo, names: Sequence[str], caller: Caller) -> ModelState:
        """Return the caller's modules with these names, with the policies of all traffic."""
        _, watching = await watched_model(self._ledger, info.name)
        found = await self.look_up(
            info, *((MODULES, scoped(caller.tenant, name)) for name in names)
        )
        return await self._state(info, caller, found, (), watching)

    async def _state(
        self,
        info: ModelInfo,
        caller: Caller,
        found: Lookup,
        patch: Sequence[PatchSpec],
        watching: Sequence[Policy],
    ) -> ModelState:
        """Return the modules that were found, and the source runs that patches name.

        `watching`: the policies of all traffic.
        """
        modules = {
            shown(name): msgspec.structs.replace(module, name=shown(name))
            for (plural, name), module in found.records.items()
            if plural == MODULES.plural
        }
        known = own(caller.tenant, found.names.get(MODULES.plural, ()))
        runs = await find_runs(self._ledger, info.name, patch, caller)
        every_run = (
            await LedgerRuns(self._ledger, caller).names(info.name)
            if len(runs) < len(runs_of(patch))
            else []
        )
        guards = [
            policy
            for policy in watching
            if policy.mode != "shadow" and policy.current.content.edits == "refuse"
        ]
        return ModelState(modules, known, runs, every_run, guards=guards)

    async def tokenised(
        self, info: ModelInfo, specs: Sequence[SteeringSpec]
    ) -> Sequence[SteeringSpec]:
        """Return steering with token ids in place of the texts of its triggers."""
        if any(spec.trigger is not None and spec.trigger.text is not None for spec in specs):
            return await with_trigger_tokens(specs, await self._served.codec(info))
        return specs

    async def features(
        self, info: ModelInfo, specs: Sequence[SteeringSpec], found: Lookup | None = None
    ) -> NamedFeatures:
        """Return the features and directions that steering names. Raises a 400 naming the field.

        `found`: the artifacts that it names, if they are known.
        """
        if found is None:
            found = await self.look_up(info, *(each for spec in specs for each in spec.references))
        saes = {}
        lenses = {}
        for index, spec in enumerate(specs):
            at = f"steering[{index}]"
            if spec.jacobian is not None:
                lenses[spec.jacobian] = named_jacobian(spec.jacobian, f"{at}.jacobian", info, found)
            if spec.sae is not None:
                saes[spec.sae] = named_sae(spec.sae, f"{at}.sae", info, found)
        rows: dict[tuple[str, int], FeatureVectors] = {}
        for name, features in check_specs(specs, saes).items():
            result = await anyio.to_thread.run_sync(
                self._features.read, saes[name], features, limiter=self._reading_files
            )
            check_range(saes[name], info, result)
            rows |= {(name, feature): value for feature, value in result.items()}
        plain = {}
        for directed in check_directed(specs, lenses, info):
            ids = await single_tokens(directed.tokens, await self._served.codec(info))
            plain[directed.at] = await anyio.to_thread.run_sync(
                self._directions.plain_specs,
                directed,
                list(ids.values()),
                limiter=self._reading_files,
            )
        return NamedFeatures(saes, rows, plain) if saes or lenses else NONE


def modules_of(parsed: ParsedRequest) -> list[str]:
    """Return the modules that a request names, each once."""
    return modules_named(all_steering(parsed).values(), parsed.patch)


def names_something(parsed: ParsedRequest) -> bool:
    """Return whether the request names what may change or be deleted after it is accepted."""
    return bool(
        artifacts_of(parsed, ()) or parsed.readings or modules_of(parsed) or runs_of(parsed.patch)
    )


def artifacts_of(parsed: ParsedRequest, extensions: Sequence[Extension]) -> list[NamedArtifact]:
    """Return the registered artifacts that the request names, besides modules. `extensions`: those
    of the model.
    """
    probes = (use.probe if isinstance(use, ProbeUse) else use for use in parsed.probes)
    return [
        *references((LORAS, parsed.lora)),
        *artifacts_read(parsed, extensions),
        *((PROBES, name) for name in probes),
        *((POLICIES, name) for name in parsed.policies),
        *(parsed.capture.references if parsed.capture else ()),
        *(reference for spec in parsed.steering for reference in spec.references),
    ]
