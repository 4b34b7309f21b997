"""The whole service on the demo model in fp32: what it answers to a sweep is what TransformerLens says, cell by cell.

`tests/data/patching.safetensors` is made by `make lens`; what is in it: `benchmarks/lens.py`.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import safe_open
from stack import Stack
from tolerances import FP32_BATCH_LOGITS, LENS_LOGITS

from midstream.schemas.base import from_json
from midstream.schemas.jobs import JobResult, JobView, State
from midstream.schemas.selectors import resolve_hook
from midstream.schemas.sweeps import SweepResult
from midstream.workers.demo_model import fetch_demo_model

LENS = Path(__file__).resolve().parents[1] / "data" / "patching.safetensors"
HOOKS = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]


class Golden:
    """What TransformerLens said."""

    def __init__(self) -> None:
        with safe_open(LENS, "np") as file:
            self.pairs: list[dict[str, Any]] = json.loads(file.metadata()["pairs"])
            self.grids = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


class Service:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.http = httpx.Client(base_url=stack.url, timeout=90)

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json={"model": "demo", **body})
        assert answer.status_code in (200, 202), answer.text
        return dict(answer.json())

    def sweep(self, **body: Any) -> SweepResult:
        job = self.post("/v1/sweeps", **body)["id"]
        while (view := from_json(self.http.get(f"/v1/jobs/{job}", params={"wait": 30}).content, JobView)).state in (
            State.QUEUED,
            State.RUNNING,
        ):
            time.sleep(0.01)
        assert view.state is State.SUCCEEDED, view.error
        result = from_json(self.http.get(f"/v1/jobs/{job}/result").content, JobResult).sweep
        assert result is not None
        return result


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = {"engine": "vllm", "model": str(fetch_demo_model()), "model_name": "demo", "dtype": "float32", "max_model_len": 512}
    options["hooks"] = "all,inside"
    patience = {"kv_cache_gib": 0.5, "lease_s": 15.0, "visibility_timeout_s": 30}
    with Stack(tmp_path_factory.mktemp("patching"), api=True, callbacks=False, start_timeout_s=180, **options, **patience) as stack:
        yield Service(stack)


def asked(pair: dict[str, Any]) -> dict[str, Any]:
    texts = {name: pair[name] for name in ("clean", "corrupt", "answer", "foil")}
    return texts | ({"alignment": pair["places"]} if pair["places"] else {})


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([0], id="one pair", marks=pytest.mark.long),
        pytest.param([1, 2], id="two pairs, one of them aligned by hand"),
    ],
)
def test_every_cell_of_a_sweep_is_the_logit_difference_that_transformer_lens_gives(service: Service, golden: Golden, numbers) -> None:
    pairs = [golden.pairs[number] for number in numbers]
    result = service.sweep(pairs=[asked(pair) for pair in pairs], hooks=HOOKS, metric="logit_diff", noise=2)
    for place, number in enumerate(numbers):
        pair, found = golden.pairs[number], result.pairs[place]
        assert found.base is not None
        assert found.source is not None
        assert abs(found.base.value - pair["logit_diff"]["corrupt"]) <= LENS_LOGITS
        assert abs(found.source.value - pair["logit_diff"]["clean"]) <= LENS_LOGITS
        assert found.noise_floor is not None
        assert found.noise_floor <= FP32_BATCH_LOGITS
        for hook in HOOKS:
            wanted = golden.grids[f"{number}.{hook}"]
            grid = np.array(found.grids[resolve_hook(hook)], dtype=np.float32)  # null becomes NaN
            assert grid.shape == wanted.shape
            assert np.array_equal(np.isnan(grid), np.isnan(wanted)), (number, hook)
            assert np.nanmax(np.abs(grid - wanted)) <= LENS_LOGITS, (number, hook)
        alone = sorted({skipped.column for skipped in result.skipped if skipped.pair == place})
        assert alone == sorted(np.flatnonzero(np.isnan(golden.grids[f"{number}.resid_pre"][0])).tolist())
    cells = sum(int(np.isfinite(golden.grids[f"{number}.{hook}"]).sum()) for number in numbers for hook in HOOKS)
    assert result.summary.cells == cells
    assert result.summary.cells + result.summary.skipped == result.summary.total


def test_noising_the_last_stream_removes_the_whole_effect(service: Service, golden: Golden) -> None:
    """The other direction, as a share of the difference: all of it at the last layer's last token, nothing at its first."""
    pair = golden.pairs[0]
    result = service.sweep(pairs=[asked(pair)], layers=[29], positions=[-1, 0], direction="noise", noise=1)
    (found,) = result.pairs
    assert result.metric == "recovered"
    assert found.base is not None
    assert abs(found.base.value - pair["logit_diff"]["clean"]) <= LENS_LOGITS
    ((first, last),) = found.grids["post_block"]
    assert found.positions == [[0], [9]]
    assert first is not None
    assert last is not None
    assert abs(first) <= LENS_LOGITS
    assert abs(last - 1.0) <= LENS_LOGITS


def test_a_chat_is_patched_with_the_rows_of_another_chat(service: Service) -> None:
    def chat(text: str, **body: Any) -> dict[str, float]:
        answer = service.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": text}],
            max_tokens=1,
            temperature=0,
            logprobs=True,
            top_logprobs=5,
            **body,
        )
        assert answer.get("determinism", {}).get("consistent", True) is True
        return {each["token"]: each["logprob"] for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}

    source = {"hook": "post_block", "layers": [0, 29], "positions": "all_prompt", "run": "colours"}
    clean = chat("Name a colour, please, and nothing else.", capture=source, capture_wait=True)
    plain = chat("Count to two.")
    last = {"layers": 29, "positions": [-1], "source": {"run": "colours", "position": -1}}
    patched = chat("Count to two.", patch=[last])
    assert patched.keys() == clean.keys() != plain.keys()
    assert max(abs(patched[token] - clean[token]) for token in clean) <= FP32_BATCH_LOGITS
    untouched = chat("Count to two.", patch=[last | {"alpha": 0}])
    assert max(abs(untouched[token] - plain[token]) for token in plain) <= FP32_BATCH_LOGITS


def test_an_unknown_source_run_is_refused_by_name(service: Service) -> None:
    answer = service.http.post(
        "/v1/completions", json={"model": "demo", "prompt": "a", "patch": [{"layers": 1, "positions": [0], "source": {"run": "nobodys"}}]}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["field"].startswith("patch[0].source")
    assert "nobodys" in answer.json()["detail"]
