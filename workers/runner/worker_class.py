"""What is a vLLM worker with the data plane in it? The platform's own, with another model runner class.

Named by `worker_cls`. Its public `midstream_*` methods are called on all ranks by `collective_rpc`.
"""

from typing import Any

import msgspec
from vllm.config import CompilationMode
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform

from ...schemas.tensors import Tensor
from .adapters import V1Adapter, V2Adapter
from .config import plane_config
from .plane import DataPlane, Place
from .process import die_with_parent, threads_elsewhere
from .sites import Switch, install, layers_path

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class MidstreamWorker(PlatformWorker):
    """One per rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        super().__init__(*args, **kwargs)
        self._plane: DataPlane | None = None

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        adapter = V2Adapter if self.use_v2_model_runner else V1Adapter
        # The platform names its runner class in code; an instance takes ours, which adds methods and no state.
        runner.__class__ = type(f"Midstream{type(runner).__name__}", (adapter, type(runner)), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        architecture = self.model_config.architectures[0]
        layers_path(architecture)  # refuse before the weights are read
        super().load_model(*args, **kwargs)
        config, switch = plane_config(), Switch()
        mode = self.vllm_config.compilation_config.mode
        traced = mode != CompilationMode.NONE or not (self.model_config.enforce_eager or current_platform.is_cpu())
        switch.always = traced
        sites, shared = install(
            self.model_runner.get_model(),
            architecture,
            switch,
            rows=config.steering_rows,
            capacity=config.capture_tokens,
            dtype=self.model_config.dtype,
            device=self.device,
        )
        pp, tp = get_pp_group(), get_tp_group()
        place = Place(rank=self.rank, world=self.parallel_config.world_size, tp=tp.rank_in_group, pp=pp.rank_in_group)
        with threads_elsewhere(set(config.cores)):
            self._plane = DataPlane(config, place, sites, shared, switch, traced=traced)
        if not pp.is_first_rank:
            self.model_runner.make_pipeline_buffers()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        """The plane is connected only now: profiling runs before it never reach it."""
        result = super().initialize_from_config(*args, **kwargs)
        self.model_runner.midstream = self._plane
        return result

    def midstream_put_vectors(self, vectors: dict[str, Any]) -> tuple[bool, str]:
        return self._connected().put_vectors(msgspec.convert(vectors, dict[str, Tensor]))

    def midstream_drop_vectors(self, names: list[str]) -> tuple[bool, str]:
        return self._connected().drop_vectors(names)

    def midstream_end(self, key: str, num_tokens: int) -> tuple[bool, str]:
        return self._connected().end(key, num_tokens)

    def midstream_cleanse(self) -> tuple[bool, str]:
        return self._connected().cleanse()

    def midstream_status(self) -> dict[str, Any]:
        return self._connected().status()

    def midstream_fault(self, text: str) -> tuple[bool, str]:
        """Tests only, see `faults`."""
        self._connected().faults.switch(text)
        return True, ""

    def midstream_close(self) -> tuple[bool, str]:
        self._connected().close()
        return True, ""

    def _connected(self) -> DataPlane:
        if self._plane is None:
            raise RuntimeError("the model is not loaded yet")
        return self._plane
