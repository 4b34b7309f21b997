"""Certifies one loaded engine with many adapters, right and wrong: its hook sites are taken off and
installed again for each.

In the engine's process, whose one rank lives in it: see `nursery`. A new engine for each takes five
times as long.
"""

import unittest.mock
from types import SimpleNamespace
from typing import Any

import msgspec
from midstream_fake_engine.rank_faults import faulty

from midstream.workers.engine.proof.certificate import Uncertified
from midstream.workers.runner.base.config import plane_config


async def certify_with(engine: Any, fault: str) -> dict[str, Any]:
    """The `certificate` of the adapter with this fault (of `rank_faults`; empty: the right one), or
    `refused`: why no engine would start.

    Beside it `taps`, what the adapter says. The engine must have started with `certify=False`, and
    with `sweep_entry=False`, whose gate is no site.
    """
    llm = engine._llm
    worker = llm._core.model_executor.driver_worker.worker
    await llm._in_thread(_install, worker, fault)
    adapter, *_ = worker._certified
    taps = str([adapter.of(layer).taps for layer in range(adapter.num_layers)])
    bare = engine.info
    settings = engine._settings
    engine._settings = msgspec.structs.replace(settings, certify=True, compare="off")
    try:
        with unittest.mock.patch.object(llm, "shutdown"):  # the next one needs the engine
            await engine._certify(trusted=False)
        return {"taps": taps, "certificate": msgspec.to_builtins(engine.info.certificate)}
    except Uncertified as error:
        return {"taps": taps, "refused": error.detail}
    finally:
        engine.info = bare
        engine._settings = settings
        engine._vectors.forget()
        await llm.reset_prefix_cache()


def _install(worker: Any, fault: str) -> None:
    """The worker's own `load_model`, on the model that is loaded."""
    from midstream.workers.runner.vllm.worker_class import PlatformWorker

    worker._plane.close()
    model = worker.model_runner.get_model()
    for part in model.modules():
        if (bare := getattr(part.__dict__.get("forward"), "bare", None)) is not None:
            part.forward = bare
    vars(model).pop("compute_logits", None)  # graded there
    msgspec.structs.replace(plane_config(), fault=fault).export()
    worker.__class__ = faulty(type(worker))
    with (
        unittest.mock.patch.object(PlatformWorker, "load_model"),
        unittest.mock.patch.object(PlatformWorker, "initialize_from_config"),
    ):
        worker.load_model()
        worker.initialize_from_config(SimpleNamespace(num_blocks=worker.model_runner.num_blocks))
