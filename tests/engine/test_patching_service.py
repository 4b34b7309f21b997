"""The whole service on the demo model in fp32: what it answers to a sweep is what TransformerLens
says, cell by cell.

`tests/data/patching.safetensors` and `heads.safetensors` are made by `make lens`; what is in them:
`tools/peers/lens.py`, `lens_heads.py`.
"""

import json
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors import safe_open
from stack import Stack
from tolerances import FP32_BATCH_LOGITS, LENS_LOGITS

from midstream.schemas.base.records import from_json
from midstream.schemas.jobs.jobs import JobView, State
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.prompts.selectors import resolve_hook
from midstream_lab.records.sweeps import SweepResult

pytestmark = pytest.mark.long

DATA = Path(__file__).resolve().parents[1] / "data"
LENS = DATA / "patching.safetensors"
HEADS = DATA / "heads.safetensors"
HOOKS = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]

#: What TransformerLens and hooks on transformers say of heads and paths.
with safe_open(HEADS, "np") as _file:
    ABOUT: dict[str, Any] = json.loads(_file.metadata()["about"])
    GRIDS: dict[str, np.ndarray] = {name: _file.get_tensor(name) for name in _file.keys()}  # noqa: SIM118 - not a dict
PAIR = {name: ABOUT[name] for name in ("clean", "corrupt", "answer", "foil")}
HOOK = {"mlp": "mlp_out"}
HELD = ("attn+mlp", "attn")


class Golden:
    """What TransformerLens said."""

    def __init__(self) -> None:
        with safe_open(LENS, "np") as file:
            self.pairs: list[dict[str, Any]] = json.loads(file.metadata()["pairs"])
            self.grids = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


class Service:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.http = httpx2.Client(base_url=stack.url, timeout=90)

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json={"model": "demo", **body})
        assert answer.status_code in (200, 202), answer.text
        return dict(answer.json())

    def sweep(self, **body: Any) -> SweepResult:
        job = self.post("/v1/sweeps", **body)["id"]
        while True:
            answer = self.http.get(f"/v1/jobs/{job}", params={"wait": 30})
            view = from_json(answer.content, JobView)
            if view.state not in (State.QUEUED, State.RUNNING):
                break
            time.sleep(0.01)
        assert view.state is State.SUCCEEDED, view.error
        result = from_json(self.http.get(f"/v1/jobs/{job}/result").content, JobResult).sweep
        assert result is not None
        return result


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="module")
def service(demo_stack: Stack) -> Service:
    return Service(demo_stack)


def asked(pair: dict[str, Any]) -> dict[str, Any]:
    texts = {name: pair[name] for name in ("clean", "corrupt", "answer", "foil")}
    return texts | ({"alignment": pair["places"]} if pair["places"] else {})


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([0], id="one pair"),
        pytest.param([1, 2], id="two pairs, one of them aligned by hand", marks=pytest.mark.matrix),
    ],
)
def test_every_cell_of_a_sweep_is_the_logit_difference_that_transformer_lens_gives(
    service: Service, golden: Golden, numbers
) -> None:
    pairs = [golden.pairs[number] for number in numbers]
    result = service.sweep(
        pairs=[asked(pair) for pair in pairs], hooks=HOOKS, metric="logit_diff", noise=2
    )
    for place, number in enumerate(numbers):
        pair = golden.pairs[number]
        found = result.pairs[place]
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
        assert alone == sorted(
            np.flatnonzero(np.isnan(golden.grids[f"{number}.resid_pre"][0])).tolist()
        )
    cells = sum(
        int(np.isfinite(golden.grids[f"{number}.{hook}"]).sum())
        for number in numbers
        for hook in HOOKS
    )
    assert result.summary.cells == cells
    assert result.summary.cells + result.summary.skipped == result.summary.total


def test_noising_the_last_stream_removes_the_whole_effect(service: Service, golden: Golden) -> None:
    """The other direction, as a share of the difference: all of it at the last layer's last token,
    nothing at its first.
    """
    pair = golden.pairs[0]
    result = service.sweep(
        pairs=[asked(pair)], layers=[29], positions=[-1, 0], direction="noise", noise=1
    )
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
        return {
            each["token"]: each["logprob"]
            for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }

    source = {"hook": "post_block", "layers": [0, 29], "positions": "all_prompt", "run": "colours"}
    clean = chat("Name a colour, please, and nothing else.", capture=source, capture_wait=True)
    plain = chat("Count to two.")
    last = {"layers": 29, "positions": [-1], "source": {"run": "colours", "position": -1}}
    patched = chat("Count to two.", patch=[last])
    assert patched.keys() == clean.keys() != plain.keys()
    assert max(abs(patched[token] - clean[token]) for token in clean) <= FP32_BATCH_LOGITS
    untouched = chat("Count to two.", patch=[last | {"alpha": 0}])
    assert max(abs(untouched[token] - plain[token]) for token in plain) <= FP32_BATCH_LOGITS


# --- Heads, neurons, paths
# --------------------------------------------------------------------------------------------


def swept(service: Service, **fields: Any) -> tuple[np.ndarray, SweepResult]:
    """The grid of the only hook: `[layers, columns]`."""
    result = service.sweep(pairs=[PAIR], metric="logit_diff", noise=1, **fields)
    assert not result.skipped
    (grid,) = result.pairs[0].grids.values()
    return np.array(grid, dtype=np.float32), result


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= LENS_LOGITS
    assert np.abs(wanted - ABOUT["logit_diff"]["corrupt"]).max() > 10 * LENS_LOGITS, (
        "or nothing was patched anywhere"
    )


def test_a_sweep_over_heads_is_that_of_transformer_lens(service: Service) -> None:
    got, result = swept(service, hooks=["hook_z"], axis="head", layers=list(range(30)))
    same(got, GRIDS["z.all_pos"])
    assert result.axis == "head"
    assert result.pairs[0].heads == list(range(9))


def test_a_sweep_over_heads_and_positions_is_that_of_transformer_lens(service: Service) -> None:
    layers = list(range(0, 30, ABOUT["every"]))
    got, result = swept(service, hooks=["z"], axis="head_position", heads="all", layers=layers)
    wanted = GRIDS["z.by_pos"]  # layers, positions, heads
    same(got.reshape(len(layers), wanted.shape[2], -1).transpose(0, 2, 1), wanted)
    assert result.pairs[0].heads == [
        head for head in range(wanted.shape[2]) for _ in range(wanted.shape[1])
    ]


def test_the_neurons_that_differ_most_are_those_of_transformers(service: Service) -> None:
    got, result = swept(
        service,
        hooks=["mlp.hook_post"],
        axis="neuron",
        neurons={"top": ABOUT["neurons"]},
        layers=ABOUT["senders"],
    )
    same(got, GRIDS["neurons"])
    for row in result.pairs[0].neurons["mlp_act"]:
        assert [len(chosen) for chosen in row] == [min(count, 16) for count in ABOUT["neurons"]]
        assert row[1][:1] == row[0]


def test_direct_paths_from_a_head_are_those_of_transformer_lens(service: Service) -> None:
    layer, head = ABOUT["sender"]
    got, result = swept(
        service,
        hooks=["q"],
        axis="head",
        path={"sender": {"layer": layer, "hook": "z", "head": head}},
    )
    assert result.layers == list(range(layer + 1, 30)), "those that it reaches"
    same(got, GRIDS["direct.q"][layer + 1 :])
    assert result.path is not None
    assert result.path.frozen == ["attn", "mlp"]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ABOUT["receivers"])
def test_paths_to_receivers_are_those_with_the_same_branches_held(
    service: Service, name: str, held: str
) -> None:
    """At q, k, v, the MLP and the logits."""
    wanted = GRIDS[f"{name}.{held}"]
    # of the last sender, nothing reaches keys
    there = [place for place in range(len(wanted)) if not np.isnan(wanted[place]).any()]
    ends = [
        {"layer": layer, "hook": HOOK.get(part, part), **({"head": head} if head >= 0 else {})}
        for layer, part, head in ABOUT["receivers"][name]
    ]
    got, result = swept(
        service,
        hooks=["z"],
        axis="head",
        layers=[ABOUT["senders"][place] for place in there],
        path={"receivers": ends or "logits", "frozen": held.split("+")},
    )
    same(got, wanted[there])
    assert result.path is not None
    assert result.path.frozen == held.split("+")
    assert (result.path.receivers == "logits") == (not ends)
