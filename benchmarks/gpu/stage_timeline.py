"""One decode step in which every request is steered and captured, and an idle one, as the profiler
sees them, with the launches counted.

A trace for each is left in `--out`, to be opened in a browser (Perfetto, chrome://tracing). Where
Nsight Systems is there, it records the same steps.
"""

import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import kit

#: Calls of CUDA's runtime and driver that launch something.
HOST = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
)
#: What our kernels' and ops' names begin with.
SITE = ("_site", "midstream::")
STEPS = {False: 20, True: 2}


def start(asked: kit.Options) -> Any:
    from direct import Direct

    memory_gib = kit.machine(asked.device).get("gpu_memory_gib", 1)
    model = kit.write_model(
        asked.out / "model",
        kit.shape("tiny" if asked.tiny else "8b", memory_gib),
        "bfloat16" if asked.gpu else "float32",
    )
    sink = kit.Sink()
    extra = kit.without_weights(asked) | ({"kv_cache_memory_bytes": 4 << 30} if asked.gpu else {})
    return Direct(
        kit.serving_settings(asked, asked.out / "engine", model, relay_url=sink.url), extra
    )


def fill(direct: Any, requests: int, prompt: int, generated: int, *, busy: bool) -> None:
    """Requests that are all decoding when this returns."""
    import numpy as np
    from direct import request

    from midstream.schemas.base.tensors import from_numpy
    from midstream.schemas.requests.specs import StoredCapture, StoredSteering

    info, values = direct.engine.info, np.random.default_rng(0)
    every = list(range(info.num_layers))
    names = direct.hold(
        [
            from_numpy(values.standard_normal(info.hidden_size).astype(np.float32))
            for _ in range(requests)
        ]
    )
    for place, ids in enumerate(kit.token_ids(requests, prompt, info.vocab_size)):
        wish: dict[str, Any] = {}
        if busy:
            steering = StoredSteering(
                layers=every,
                hook="post_block",
                positions="all",
                family="add",
                tensors=[names[place]],
                scale=0.1,
            )
            wish = {
                "steering": [steering],
                "captures": [
                    StoredCapture(sites={"post_block": every}, positions="all", tag="memory")
                ],
            }
        direct.add(
            request(place, ids, generated, job=f"{'busy' if busy else 'idle'}{place}", **wish)
        )
    for _ in range(4 + requests * prompt // 2048):
        direct.step()


def profiled(direct: Any, asked: kit.Options, name: str) -> Counter[str]:
    """Events of one step by name; those of the GPU begin with `gpu:`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if asked.gpu else [])]

    def record() -> Any:
        with profile(activities=activities) as profiler:
            for output in direct.engine._llm.llm.step():
                del output
            if asked.gpu:
                import torch

                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(asked.out / f"{name}.trace.json"))
        return profiler.events()

    found: Counter[str] = Counter()
    for event in direct.in_its_thread(record):
        on_gpu = event.device_type == DeviceType.CUDA
        if not on_gpu or not event.name.startswith(("Memcpy", "Memset")):
            found[("gpu:" if on_gpu else "") + event.name] += 1
    return found


def counts(found: Counter[str], gpu: bool) -> dict[str, int]:
    """`sites`, `kernels` on the GPU, `host` launches."""
    kernels = {
        name.removeprefix("gpu:"): count
        for name, count in found.items()
        if name.startswith("gpu:") == gpu
    }
    return {
        "sites": sum(count for name, count in kernels.items() if name.startswith(SITE)),
        "kernels": sum(kernels.values()) if gpu else 0,
        "host": sum(count for name, count in found.items() if name in HOST),
    }


def nsys(asked: kit.Options) -> str:
    tool = shutil.which("nsys")
    if tool is None:
        return "Nsight Systems is not there"
    command = [
        tool,
        "profile",
        "--trace=cuda",
        "--cuda-graph-trace=node",
        "--force-overwrite=true",
        "-o",
        str(asked.out / "steps"),
    ]
    command += [
        sys.executable,
        __file__,
        "--device",
        asked.device,
        "--out",
        str(asked.out / "nsys"),
        "--model",
        "under-nsys",
    ]
    try:
        done = subprocess.run(
            command + ["--tiny"] * asked.tiny,
            capture_output=True,
            text=True,
            timeout=max(10, asked.left),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "Nsight Systems did not end in time"
    return (
        f"Nsight Systems: {asked.out / 'steps.nsys-rep'}"
        if done.returncode == 0
        else f"Nsight Systems failed: {done.stderr[-300:]}"
    )


def main() -> None:
    asked = kit.options(__doc__)
    asked.out.mkdir(parents=True, exist_ok=True)
    direct = start(asked)
    sizes = (4, 6, 8) if asked.tiny else (64, 32, 40)
    if asked.model == "under-nsys":
        for name in ("idle", "busy"):
            fill(direct, *sizes, busy=name == "busy")
            direct.drain()
        direct.close()
        return
    result: dict[str, Any] = {"figures": {}, "tables": [], "notes": [f"{direct.facts}"]}
    for name in ("idle", "busy"):
        fill(direct, *sizes, busy=name == "busy")
        found = profiled(direct, asked, name)
        direct.drain()
        told = counts(found, asked.gpu)
        figures = {"idle_site_launches": told["sites"]}
        if name == "busy":
            figures = {
                "site_launches": told["sites"],
                "launches": told["kernels"],
                "host_launches": told["host"],
            }
            result["tables"].append(most_frequent(found, asked.gpu))
        result["figures"] |= {key: {"value": value} for key, value in figures.items()}
        kit.so_far(asked, result)
    direct.close()
    result["notes"] += [nsys(asked), f"traces: {asked.out}"]
    kit.finish(asked, result)


def most_frequent(found: Counter[str], gpu: bool) -> dict[str, Any]:
    """A table of kernels; of a CPU, of ops."""
    kinds = [name for name, _ in found.most_common() if name.startswith("gpu:") == gpu]
    rows = [[name.removeprefix("gpu:")[:90], found[name]] for name in kinds[:12]]
    return {"title": "Most frequent in the busy step", "columns": ["name", "times"], "rows": rows}


if __name__ == "__main__":
    main()
