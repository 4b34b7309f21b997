"""One engine on two machines, started as vLLM does without Ray: rows, steering, patches and
checksums are those of one machine, and one may be lost.
"""

import base64
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from fleet import Fleet
from network import Network
from tolerances import FP32_ROWS_30_LAYERS
from wait_kit import wait_until, warn_if_late

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.settings.settings import Settings
from midstream.workers.app import EXIT_ENGINE_DIED
from midstream_ops.demo_model import fetch_demo_model

PROMPTS = ["The Eiffel Tower is located in the city of", "The Colosseum is located in the city of"]
TEXT = "Once upon a time in a land far away there lived a king who"
LAYERS = 30
HIDDEN = 576
TOKENS = 8
ENGINE = {
    "engine": "vllm",
    "engine_options": {},
    "model_name": "demo",
    "kv_cache_gib": 0.25,
    "engine.max_model_len": 256,
    "engine.dtype": "float32",
    "certify": False,
    "lease_s": 15.0,
}

#: vLLM waits for a step for so long (its own default: 300 s).
STEP_S = 40


class Nodes(Fleet):
    """`ranks`: those of the worker's engine on another machine, with a data folder of its own."""

    def settings(self, name: str, **changed: Any) -> Settings:
        if name != "ranks":
            return super().settings(name, **changed)
        own = {"engine.node_rank": 1, "data_dir": str(self.directory / "data-of-ranks")}
        return super().settings("worker", **own | changed)

    def environment(self, name: str) -> dict[str, str]:
        return super().environment(name) | {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_S)}


def submitted(fleet: Fleet, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The result of a job that succeeded."""
    with httpx2.Client(base_url=fleet.url, timeout=120) as http:
        job = http.post(path, json={"model": "demo"} | body).raise_for_status().json()["id"]
        wait_until(
            lambda: (
                http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()["state"]
                not in ("queued", "running")
            ),
            600,
        )
        result: dict[str, Any] = http.get(f"/v1/jobs/{job}/result").raise_for_status().json()
        view = http.get(f"/v1/jobs/{job}").json()
    assert result["state"] == "succeeded", result
    return result | {
        "id": job,
        "receipts": view.get("receipts", 0),
        "attempt": view.get("attempt", 0),
    }


def captured(fleet: Fleet, **more: Any) -> tuple[list[str], int, list[np.ndarray]]:
    """Texts, number of receipts, and of each prompt the rows of all layers: `[layers, positions,
    hidden]`.
    """
    body = {
        "prompts": PROMPTS,
        "sampling": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        "capture": {"layers": "all", "positions": "all_prompt"},
        **more,
    }
    result = submitted(fleet, "/v1/jobs", body)
    with CaptureReader(fleet.settings("api").artifacts, result["id"]) as reader:
        assert all(check.ok for check in reader.verify())
        rows = [
            np.stack(
                [reader.array(layer, reader.hooks(number)[0], number) for layer in range(LAYERS)]
            )
            for number in range(len(PROMPTS))
        ]
    return [output["text"] for output in result["outputs"]], result["receipts"], rows


def steering() -> list[dict[str, Any]]:
    """A vector at a layer of either machine."""
    vector = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    tensor = {
        "dtype": "float32",
        "shape": [HIDDEN],
        "data": base64.b64encode(vector.tobytes()).decode(),
    }
    return [{"layers": [3, 20], "vector": tensor, "scale": 2.0}]


def patched(fleet: Fleet) -> list[float]:
    pair = {"clean": PROMPTS[0], "corrupt": PROMPTS[1], "answer": " Paris", "foil": " Rome"}
    body = {
        "pairs": [pair],
        "layers": [2, 14, 15, 28],
        "positions": "last_prompt",
        "metric": "logit_diff",
    }
    summary = submitted(fleet, "/v1/sweeps", body)["sweep"]
    assert summary["summary"]["cells"] == summary["summary"]["total"] > 0
    return [
        float(value)
        for pair in summary["pairs"]
        for grid in pair["grids"].values()
        for row in grid
        for value in row
    ]


def answers(fleet: Fleet) -> tuple[Any, Any, list[float]]:
    """What a plain and a steered job capture, and the values of a sweep."""
    return captured(fleet), captured(fleet, steering=steering()), patched(fleet)


def check_answers(fleet: Fleet, alone: tuple[Any, Any, list[float]]) -> None:
    """Two machines answer as one alone did, and each reports on every prompt."""
    *found, grid = answers(fleet)
    *expected, expected_grid = alone
    for (texts, receipts, rows), (expected_texts, of_one, expected_rows) in zip(
        found, expected, strict=True
    ):
        assert texts == expected_texts
        assert receipts == 2 * of_one
        assert close(rows, expected_rows)
    assert np.allclose(grid, expected_grid, atol=1e-3)
    assert not np.allclose(found[0][2][0][25], found[1][2][0][25]), "the vector changed nothing"
    assert "disagree" not in fleet.log("relay")


def close(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    worst = max(
        float(np.max(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))
        for a, b in zip(mine, theirs, strict=True)
    )
    print(f"worst row: {worst:.2e}")
    return worst < FP32_ROWS_30_LAYERS


@pytest.mark.timeout(2400)
def test_an_engine_on_two_machines_gives_the_rows_of_one(tmp_path: Path) -> None:
    model = str(fetch_demo_model())
    one = ("relay", "callbacks", "worker", "api")
    with Network("w1", "w2") as network:
        with Fleet(
            tmp_path / "one", network, {"worker": "w1"}, one, model=model, **ENGINE
        ) as fleet:
            alone = answers(fleet)
        nodes = {
            "engine.pipeline_parallel_size": 2,
            "engine.nnodes": 2,
            "engine.master_addr": network.address("w1"),
            "artifact_store": str(tmp_path / "captures"),
        }
        two = ("relay", "callbacks", "ranks", "worker", "api")
        where = {"worker": "w1", "ranks": "w2"}
        with Nodes(tmp_path / "two", network, where, two, model=model, **ENGINE, **nodes) as fleet:
            check_answers(fleet, alone)
            outboxes = [fleet.settings(name).data_dir for name in ("worker", "ranks")]
            assert [[*Path(folder, "outbox").glob("*")] != [] for folder in outboxes] == [True] * 2
            lose(fleet, lambda: fleet.kill("ranks"), ended="worker", within=2 * STEP_S)
            lose(fleet, lambda: network.cut("w1", "w2"), ended="worker", within=2 * STEP_S)
            lose(fleet, lambda: fleet.kill("worker"), ended="ranks", within=STEP_S)


class Supervisor:
    """Starts processes again when they end, as a service manager does.

    `ended`: name, exit code and time of each end.
    """

    def __init__(self, fleet: Fleet, *names: str):
        self._fleet = fleet
        self._names = names
        self.ended: list[tuple[str, int, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            for name in self._names:
                code = self._fleet.processes[name].poll()
                if code is not None:
                    self.ended.append((name, code, time.monotonic()))
                    self._fleet.spawn(name)

    def __enter__(self) -> "Supervisor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def lose(fleet: Fleet, part: Callable[[], object], *, ended: str, within: float) -> None:
    """A part of the engine is lost while a job runs: the other part ends (on a quiet machine within
    so many seconds), and once both have started again, the jobs are done.
    """
    expected = captured(fleet)[0]
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"model": "demo", "prompts": PROMPTS, "sampling": sampling}
    long = body | {"prompts": [TEXT], "sampling": sampling | {"max_tokens": 150}}
    with (
        httpx2.Client(base_url=fleet.url, timeout=60) as http,
        Supervisor(fleet, "ranks", "worker") as supervisor,
    ):
        running = http.post("/v1/jobs", json=long).raise_for_status().json()["id"]
        wait_until(lambda: http.get(f"/v1/jobs/{running}").json()["state"] == "running", 300)
        began = time.monotonic()
        part()
        job = http.post("/v1/jobs", json=body).raise_for_status().json()["id"]
        wait_until(lambda: any(name == ended for name, _, _ in supervisor.ended), 600)
        _, code, when = next(end for end in supervisor.ended if end[0] == ended)
        print(f"the {ended} ended with {code} after {when - began:.1f} s")
        assert code == EXIT_ENGINE_DIED
        warn_if_late(when - began, within, f"the {ended} should notice the loss earlier")
        fleet.network.heal()
        for each in (job, running):
            wait_until(lambda: http.get(f"/v1/jobs/{each}").json()["state"] == "succeeded", 600)  # noqa: B023
        print(
            f"and the jobs were done {time.monotonic() - began:.1f} s after it; ends: "
            f"{[end[:2] for end in supervisor.ended]}"
        )
        assert http.get(f"/v1/jobs/{running}").json()["attempt"] > 1
        outputs = http.get(f"/v1/jobs/{job}/result").json()["outputs"]
        assert [output["text"] for output in outputs] == expected
