"""Which processes does the fault gate run, how are they killed, and when was each of them away?

`Stack` of the system tests with several API replicas. Every process is started again by the harness, as a supervisor would.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack import Stack, free_port

#: Timeouts of a minute would make the gate wait for them; what is shown does not depend on their length.
SETTINGS: dict[str, Any] = {
    "fake_token_s": 0.02,
    "lease_s": 5.0,
    "visibility_timeout_s": 6,
    "sweep_interval_s": 0.5,
    "capture_timeout_s": 20.0,
    "max_wait_s": 15.0,
    "worker_concurrency": 48,
    "max_num_seqs": 64,
    "webhook_allow_private": True,
    "log_level": "WARNING",
}
#: Whoever starts while Redis restarts may end with an error.
STARTS = 5


@dataclass
class Outage:
    """From the kill to the ready line, seconds of `time.monotonic`."""

    name: str
    killed: float
    ready: float = float("inf")


class Cluster(Stack):
    """`workers` workers (`worker`, `worker-2`, …) and `apis` API replicas (`api`, `api-2`, …), which clients choose from."""

    def __init__(self, directory: Path, *, workers: int = 2, apis: int = 2, callbacks_fault: str = "", **settings: Any):
        """`callbacks_fault`: the setting `fault` of the callbacks process, which moves its clock."""
        super().__init__(directory, api=False, workers=workers, start_timeout_s=120, **(SETTINGS | settings))
        replicas = ["api", *[f"api-{number}" for number in range(2, apis + 1)]][:apis]
        self.ports = {name: free_port() for name in replicas}
        self.names += replicas
        self.workers = [name for name in self.names if name.startswith("worker")]
        self.outages: list[Outage] = []
        self._callbacks_fault = callbacks_fault

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}

    def spawn(self, name: str, *, suffix: bool = True, **changed: Any) -> None:
        if name in self.ports:
            changed["api_port"] = self.ports[name]
        if name == "callbacks":
            changed.setdefault("fault", self._callbacks_fault)
        super().spawn(name, suffix=suffix, **changed)

    def strike(self, name: str) -> Outage:
        """`kill -9`."""
        outage = Outage(name, time.monotonic())
        self.outages.append(outage)
        self.kill(name)
        return outage

    def revive(self, outage: Outage, **changed: Any) -> None:
        """Start it again, as a supervisor would also when it ends while it starts, and wait until it is ready."""
        for left in reversed(range(STARTS)):
            try:
                self.restart(outage.name, **changed)
                break
            except AssertionError:
                if not left or outage.name == "redis" or self.processes[outage.name].poll() is None:
                    raise
        outage.ready = time.monotonic()

    def was_away(self, name: str, start: float, end: float) -> bool:
        """Whether `name` was killed, or not ready again, at some time between."""
        return any(outage.name == name and outage.killed <= end and outage.ready >= start for outage in self.outages)
