"""One engine on two machines over Ray, on CPUs: rows, steering and patches are those of one
machine, and one machine may be lost.

vLLM refuses Ray on CPUs; the platform in `ray_platform` has the device key that Ray places ranks
by. Ray is not among the packages of the lock files: `pip install ray`, or the folder that has it in
PYTHONPATH.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from network import Network
from test_nodes import ENGINE, answers, check_answers
from wait_kit import wait_until

from midstream.workers.app import EXIT_ENGINE_DIED
from midstream_ops.demo_model import fetch_demo_model

PLATFORM = Path(__file__).with_name("ray_platform")
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
PORT = 6379
START_S = 60


class Ray:
    """A Ray node on each of `machines`, of which the first is the head, with one device each."""

    def __init__(self, network: Network, directory: Path, *machines: str):
        self.network = network
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"{network.address(machines[0])}:{PORT}"
        for machine in machines:
            self.start(
                machine,
                [f"--address={self.address}"]
                if self.processes
                else ["--head", f"--port={PORT}", "--include-dashboard=false"],
            )

    def environment(self, machine: str) -> dict[str, str]:
        place = {
            "VLLM_HOST_IP": self.network.address(machine),
            "GLOO_SOCKET_IFNAME": self.network.device(machine),
        }
        path = os.pathsep.join([str(PLATFORM), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**ENVIRONMENT, **place, "PYTHONPATH": path, "RAY_ADDRESS": self.address}

    def start(self, machine: str, options: list[str]) -> None:
        own = [
            f"--node-ip-address={self.network.address(machine)}",
            "--num-gpus=1",
            "--num-cpus=2",
            "--object-store-memory=200000000",
        ]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *own, "--block"]
        log = self.directory / f"ray-{machine}.log"
        environment = {**os.environ, **self.environment(machine)}
        environment.pop("RAY_ADDRESS")
        with log.open("wb") as file:
            self.processes[machine] = self.network.popen(
                machine, command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        wait_until(lambda: "Ray runtime started" in log.read_text(), START_S)

    def kill(self, machine: str) -> None:
        """The node with all that runs on it."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.network.namespace(machine)],
            capture_output=True,
            text=True,
            check=True,
        )
        subprocess.run(["kill", "-9", *pids.stdout.split()], check=False, capture_output=True)
        self.processes[machine].wait()

    def stop(self) -> None:
        for machine, process in self.processes.items():
            if process.poll() is None:
                self.kill(machine)


class RayFleet(Fleet):
    ray: Ray

    def environment(self, name: str) -> dict[str, str]:
        if name != "worker":
            return super().environment(name)
        return (
            super().environment(name)
            | self.ray.environment("w1")
            | {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "_MIDSTREAM_PLANE"}
        )


@pytest.mark.timeout(900)
def test_an_engine_over_ray_gives_the_rows_of_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: it is in no lock file")
    names = ("relay", "callbacks", "worker", "api")
    model = str(fetch_demo_model())
    with Network("w1", "w2") as network:
        with Fleet(
            tmp_path / "one", network, {"worker": "w1"}, names, model=model, **ENGINE
        ) as fleet:
            alone = answers(fleet)
        options: dict[str, Any] = {"engine.pipeline_parallel_size": 2, "executor": "ray"}
        over = RayFleet(
            tmp_path / "two", network, {"worker": "w1"}, names, model=model, **ENGINE, **options
        )
        over.ray = ray = Ray(network, tmp_path, "w1", "w2")
        try:
            with over as fleet:
                check_answers(fleet, alone)
                began = time.monotonic()
                ray.kill("w2")
                wait_until(lambda: fleet.processes["worker"].poll() is not None, 120)
                print(f"the worker ended {time.monotonic() - began:.1f} s after the other machine")
                assert fleet.processes["worker"].poll() == EXIT_ENGINE_DIED
        finally:
            ray.stop()
