"""vLLM worker with the data plane: the platform's worker with another model runner class.

vLLM's setting `worker_cls` names it. `collective_rpc` calls its public `midstream_*` methods on all
ranks.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group, get_world_group
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform

from ....broker.processes.orphans import die_with_parent
from ....broker.telemetry import logs
from ....kernels import IDLE, STREAM, WHOLE
from ....schemas.base.records import learn_records
from ....schemas.base.tensors import Tensor
from ....schemas.extensions import Extension
from ....schemas.prompts.selectors import INSIDE
from ....schemas.readings.features import StoredFeatures
from ....schemas.requests.source_runs import RunFiles
from ....schemas.requests.steering import GlobalSteering
from ..base.compile_key import layout
from ..base.config import VARIABLE, Found, PlaneConfig, RankPlace, join, plane_config
from ..base.extensions import ExtensionError, trusted
from ..base.process import threads_elsewhere
from ..certificate.certify import Certifier
from ..certificate.laws import CertificatePlan
from ..certificate.together import NoAnswerError
from ..edits.installed_ops import load_ops
from ..hooks.architectures import UnsupportedArchitectureError, describe
from ..hooks.layer_kinds import attention_kinds, routing_kinds
from ..hooks.sites import (
    RankSite,
    Sizes,
    complete,
    install,
    read_between_layers,
    stream_hooks,
    warm_up,
)
from ..plane.data_plane import DataPlane, RankAnswer, answer
from ..plane.grading import tap
from ..plane.inside_hooks import Group, install_inside
from ..plane.layer_gate import enters_above, exits_below, install_gate
from ..plane.loras import LoadedAdapters
from ..readings.features import FeatureReader
from ..readings.installed_readers import LoadedReader, load_readers
from ..readings.readers import readers_of
from ..support import build_errors, cpu_drafts
from ..support.denylist import UnsupportedConfigurationError, check
from ..support.drafters import UnsupportedDrafterError, check_loaded
from ..support.quantisation import (
    UnsupportedQuantisationError,
    check_kernels,
    quantisation_of,
    refuse_shared_scales,
)
from . import idle_sleep, zeroed_blocks
from .runner_adapters import V1Adapter, V2Adapter

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = logging.getLogger(__name__)

#: Exit code of a rank whose part of the certification failed while others wait for it.
EXIT_ALONE = 71

cpu_drafts.install()
idle_sleep.install()
zeroed_blocks.install()


class MidstreamWorker(PlatformWorker):
    """The vLLM worker of one rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        super().__init__(*args, **kwargs)
        config = plane_config()
        logs.configure(
            config.log_format, config.log_level, "rank", worker=config.worker, rank=self.rank
        )
        self._plane: DataPlane | None = None
        self._found = Found()
        self._certifier: Certifier | None = None

    def init_device(self) -> None:
        super().init_device()
        # the ranks of a further machine know only what its own settings say
        join(get_world_group().broadcast_object(os.environ[VARIABLE]))
        self.vllm_config.additional_config = layout(plane_config())
        runner = self.model_runner
        mixed: tuple[type, ...] = (
            V2Adapter if self.vllm_config.use_v2_model_runner else V1Adapter,
        )
        if current_platform.is_cpu():
            mixed = (*mixed, zeroed_blocks.CpuBlocks)
        # vLLM hard-codes the platform's runner class, so the instance's class is replaced by a
        # subclass, which adds methods but no state.
        runner.__class__ = type(f"Midstream{type(runner).__name__}", (*mixed, type(runner)), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # The worker has checked its own copy, for a clear error; the runner obeys this one.
        caveats = check(self.vllm_config)
        config = plane_config()
        model = self.vllm_config.model_config
        # the ranks of another machine may have another vLLM or other variables
        if unknown := [caveat for caveat in caveats if caveat not in config.caveats]:
            raise UnsupportedConfigurationError(
                f"this rank's vLLM is not configured like the worker's: {'; '.join(unknown)}"
            )
        # both refuse models before the weights are read
        adapter = describe(model.architectures[0], model.hf_config, model.max_model_len)
        quantisation = quantisation_of(self.vllm_config)
        super().load_model(*args, **kwargs)
        # Created before anything runs, because on CPUs it replaces vLLM's arithmetic.
        loras = (
            # vLLM has replaced the linear layers, so sites on them are behind the adapter's product
            LoadedAdapters(self.model_runner.lora_manager, Path(config.spill_dir))
            if self.vllm_config.lora_config is not None
            else None
        )
        try:
            if quantisation.name:
                # checked again: this machine's processor may differ from the worker's
                check_kernels(self.vllm_config, quantisation.name)
            refuse_shared_scales(self.get_model())
            with (
                set_current_vllm_config(self.vllm_config),
                set_forward_context(None, self.vllm_config),
            ):
                adapter = complete(
                    adapter,
                    self.get_model(),
                    model.hf_config.get_text_config(),
                    dtype=model.dtype,
                    device=self.device,
                )
            found = Found(
                hooks=list(adapter.hooks),
                absent={str(hook): why for hook, why in adapter.variant.absent.items()},
                multiplied=list(adapter.multiplied),
            )
        except (UnsupportedArchitectureError, UnsupportedQuantisationError) as error:
            # The worker reads this and ends the engine with the reason; an exception here would
            # end the engine without one.
            found = Found(refused=error.detail)
        refused = found.refused
        pp = get_pp_group()
        tp = get_tp_group()
        kinds = (
            []
            if refused
            else attention_kinds(
                self.get_model(),
                adapter,
                lambda values: tp.all_gather(values, 0),
                tp.world_size,
            )
        )
        traced = self.vllm_config.compilation_config.mode != CompilationMode.NONE or not (
            model.enforce_eager or current_platform.is_cpu()
        )
        hooks = tuple(
            hook
            for hook in adapter.hooks
            if hook in found.hooks and (not config.hooks or hook in config.hooks)
        )
        loaded = self.get_model()
        sites, buffers = install(
            loaded,
            adapter,
            _sizes(config, len(hooks) * adapter.num_layers),
            hooks,
            dtype=model.dtype,
            device=self.device,
            always=traced,
        )
        inside, inner, absent = install_inside(
            loaded,
            adapter,
            [hook for hook in INSIDE if hook in config.inside],
            Group(tp.rank_in_group, tp.world_size, adapter.hidden_size),
            partial(_sizes, config),
            dtype=model.dtype,
            device=self.device,
            always=traced,
        )
        self._use_families([*sites, *(site for part in inside for site in part.sites)])
        shapes = {str(hook): places[0].columns.row for hook, places in inner.items()}
        try:
            check_loaded(
                self.model_runner.drafting_model(), read_between_layers(loaded, adapter), adapter
            )
        except UnsupportedDrafterError as error:
            refused = refused or str(error)
        for of_bank, its_buffers in [
            (sites, buffers),
            *((part.sites, part.buffers) for part in inside),
        ]:
            warm_up(of_bank, its_buffers)
        place = RankPlace(
            rank=self.rank,
            world=self.vllm_config.parallel_config.world_size,
            tp=tp.rank_in_group,
            pp=pp.rank_in_group,
            stages=pp.world_size,
        )
        enters = config.sweep_entry and not traced and "pre_attn" in hooks and enters_above(adapter)
        exits = not traced and exits_below(adapter)
        installed: dict[str, LoadedReader] = {}
        ops: list[Extension] = []
        try:
            offers = trusted(config.extensions)
            installed = load_readers(offers, adapter.hidden_size, adapter.num_layers, hooks)
            ops = load_ops(offers, adapter.hidden_size, cpu=self.device.type == "cpu")
        except ExtensionError as error:
            refused = refused or str(error)
        readers, readings = readers_of(
            loaded,
            adapter,
            dtype=model.dtype,
            device=self.device,
            stages=pp.world_size,
            reduce=tp.all_reduce,
            lens_dir=config.lens_dir,
            installed=installed,
            sites=[(site.hook, site.layer) for site in sites] if place.tp == 0 else [],
        )
        extensions = [*(reader.facts for reader in installed.values()), *ops]
        self._found = msgspec.structs.replace(
            found,
            inside=shapes,
            absent=found.absent | absent,
            refused=refused,
            readings=readings,
            extensions=extensions,
            enters=enters,
            exits=exits,
            attention=kinds,
        )
        gate = install_gate(loaded, adapter, enters=enters) if enters or exits else None
        with threads_elsewhere(set(config.cores)):
            learn_records()
            self._plane = DataPlane(
                config,
                place,
                sites,
                buffers,
                num_layers=adapter.num_layers,
                traced=traced,
                gate=gate,
                loras=loras,
                readers=readers,
                inside=inside,
            )
        self._plane.describe(
            attention=tuple(kinds),
            routing=tuple(routing_kinds(loaded, adapter)) if "router" in inner else (),
        )
        self._certified = adapter, hooks, traced, inner
        if place.grades:
            tap(loaded, self._plane.grade)
        if not pp.is_first_rank:
            tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            self.model_runner.make_pipeline_buffers(loaded, tokens, model.dtype, self.device)

    def _use_families(self, sites: Sequence[RankSite]) -> None:
        """Have the runner capture the graph families that a step may be of, see `kernels.ops`."""
        if plane_config().graph_families:
            families = (WHOLE, STREAM, IDLE) if stream_hooks(sites) else (WHOLE, IDLE)
            self.model_runner.use_families(families)

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Connect the plane to the runner, only now, so that profiling runs do not reach it."""
        self.model_runner.num_blocks = kv_cache_config.num_blocks
        result = super().initialize_from_config(kv_cache_config, *args, **kwargs)
        plane = self.model_runner.midstream = self._connected()
        if plane.block_size > 1:
            plane.block_size = self.vllm_config.cache_config.block_size or plane.block_size
        if plane.entering is not None:
            cache = self.vllm_config.cache_config
            # without a prefix cache no block is shared
            plane.entering.block_size = (
                (cache.block_size or 1) if cache.enable_prefix_caching else sys.maxsize
            )
        return result

    # Methods that change state return (success, reason); a rank that refuses has changed nothing.

    def midstream_put_vectors(self, vectors: dict[str, Any], users: list[Any]) -> RankAnswer:
        """Store steering tensors. `users`: steering of requests that will use them, each a
        `list[StoredSteering]`, which is laid out ahead.
        """

        def put(plane: DataPlane) -> None:
            plane.rank_state.vectors.put(msgspec.convert(vectors, dict[str, Tensor]))
            plane.expect(users)

        return self._answer(put)

    def midstream_drop_vectors(self, names: list[str]) -> RankAnswer:
        return self._answer(lambda plane: plane.rank_state.vectors.drop(names))

    def midstream_put_run(self, run: dict[str, Any]) -> RankAnswer:
        """Load a source run: a `RunFiles` as plain containers. This rank reads only the rows that
        its own sites need, and waits for no other rank.
        """
        return self._answer(lambda plane: plane.runs.put(msgspec.convert(run, RunFiles)))

    def midstream_drop_runs(self, keys: list[str]) -> RankAnswer:
        return self._answer(lambda plane: plane.runs.drop(keys))

    def midstream_put_lora(self, number: int, digest: str, folder: str) -> RankAnswer:
        """Load a LoRA adapter, whose files must have this digest. `number`: vLLM's number of it."""
        return self._answer(lambda _: self._loras().put(number, digest, folder))

    def midstream_drop_loras(self, numbers: list[int]) -> RankAnswer:
        return self._answer(lambda _: self._loras().drop(numbers))

    def midstream_put_sae(self, digest: str, hook: str, layer: int, folder: str) -> RankAnswer:
        """Load a sparse autoencoder, whose files must have this digest. Ranks that read no rows at
        `hook` of `layer` load nothing.
        """
        return self._answer(lambda plane: _features(plane).put(digest, hook, layer, folder))

    def midstream_drop_saes(self, digests: list[str]) -> RankAnswer:
        return self._answer(lambda plane: _features(plane).drop(digests))

    def midstream_lora_modules(self) -> dict[str, Any]:
        """Return the modules that LoRA adapters may change."""
        with set_current_vllm_config(self.vllm_config):  # transformers may build vLLM's modules
            return self._loras().modules(self.vllm_config.model_config.hf_config)

    def midstream_check_global(self, steering: dict[str, Any]) -> RankAnswer:
        """Check whether a `GlobalSteering`, as plain containers, could be applied to requests."""
        needed = msgspec.convert(steering, GlobalSteering)
        return self._answer(lambda plane: plane.rank_state.check_global(needed))

    def midstream_forget_failures(self, steps: list[int]) -> RankAnswer:
        return self._answer(lambda plane: plane.forget_failures(steps))

    def midstream_restart_ledger(self) -> RankAnswer:
        return self._answer(lambda plane: plane.restart())

    def midstream_found(self) -> dict[str, Any]:
        """Return the rank's `Found` as plain containers."""
        found: dict[str, Any] = msgspec.to_builtins(self._found)
        return found

    def midstream_fingerprint(self) -> str:
        return self._connected().fingerprint()

    def midstream_status(self) -> dict[str, Any]:
        return self._connected().status()

    def midstream_certify(self, action: str, arguments: dict[str, Any]) -> Any:
        """Make a call of the certification run: `begin` first, then methods of `Certifier`, `end`
        last.
        """
        if action == "begin":
            adapter, hooks, traced, inner = self._certified
            self._certifier = Certifier(
                self._connected(),
                self,
                adapter,
                self.vllm_config,
                hooks,
                inner,
                traced=traced,
            )
            return None
        if action == "end":
            certifier = self._certifier
            self._certifier = None
            return certifier.end(**arguments) if certifier is not None else None
        if action == "judge" and self._certifier is not None:
            config = plane_config()
            try:
                with build_errors.kept_for_worker(config.spill_dir, config.boot):
                    judgement = self._certifier.judge(msgspec.convert(arguments, CertificatePlan))
            except NoAnswerError as error:
                logger.critical("%s", error)
                os._exit(EXIT_ALONE)
            return msgspec.to_builtins(judgement, builtin_types=(bytes,))
        return getattr(self._certifier, action)(**arguments)

    def midstream_close(self) -> RankAnswer:
        self._connected().close()
        return True, ""

    def _answer(self, action: Callable[[DataPlane], None]) -> RankAnswer:
        plane = self._connected()
        return answer(lambda: action(plane))

    def _loras(self) -> LoadedAdapters:
        if (loras := self._connected().loras) is None:
            raise LookupError("this rank serves no adapters")
        return loras

    def _connected(self) -> DataPlane:
        if self._plane is None:
            raise RuntimeError("the model is not loaded yet")
        return self._plane


def _features(plane: DataPlane) -> FeatureReader:
    reader = plane.readings.reader(StoredFeatures)
    assert isinstance(reader, FeatureReader)
    return reader


def _sizes(config: PlaneConfig, sites: int) -> Sizes:
    """Return the sizes of the buffers of `sites` sites.

    Only CPUs read `lists`, only accelerators `capture_slots` and a ring of their own.
    """
    on_cpu = current_platform.is_cpu()
    return Sizes(
        # two halves on accelerators: one is filled while the other is copied
        ring_rows=0 if on_cpu else 2 * config.step_rows,
        capacity=config.step_tokens,
        # each of two ports of a site may capture other tokens, to places of its own, and all edits
        # share one list
        lists=(4 * sites + 1) * config.step_tokens if on_cpu else 1,
        patterns=1 if on_cpu else 2 * sites,
        configurations=config.steering_rows,
        entries=config.steering_entries,
    )
