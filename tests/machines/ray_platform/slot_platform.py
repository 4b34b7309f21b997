"""vLLM's CPU platform with a device that Ray can place: tests only.

vLLM refuses Ray on platforms without a `ray_device_key`, as the CPU's is. With this folder in
PYTHONPATH, vLLM finds the platform by its entry point, and a rank takes one of the GPUs that Ray is
told of: `ray start --num-gpus 1`. A key of our own would not do: vLLM asks Ray for the numbers of a
rank's devices, and Ray numbers only the kinds of devices that it knows.
"""

from typing import Any

NAME = "slot_platform.SlotPlatform"


def register() -> str:
    """What vLLM's plug-in group `vllm.platform_plugins` calls: the platform's name."""
    return NAME


def __getattr__(name: str) -> Any:
    """The class, made late: vLLM imports this module before its platforms."""
    if name != "SlotPlatform":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    made = type("SlotPlatform", (CpuPlatform,), {"ray_device_key": "GPU", "__module__": __name__})
    globals()[name] = made
    return made
