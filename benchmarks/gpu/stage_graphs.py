"""Replayed graphs obey plans that change every step: the same mixed steps with graphs, compiled
without graphs, and as Python.

A tiny model with random weights. `--model MODE` runs one of `MODES` and leaves its rows in `--out`;
without it, all of them are run and compared. Each step is given to each engine with the same
requests, so its batches are the same. The first mode makes as many steps as its share of the time
allows, and the others wait until they know how many those are.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import kit
import numpy as np
from tiny import checkpoint

#: What runs on a GPU, and on a CPU, which has no graphs: there the same is run again, which shows
#: that the steps are the same ones. The first decides how many steps there are; the last two are
#: compared bit for bit.
MODES = {True: ("compiled", "graphs", "eager"), False: ("again", "eager")}
LIVE = 8
LONGEST = 12
VECTORS = 16
STEPS = {False: 10_000, True: 60}
#: Of those, at most so many as Python, for the error alone.
EAGER_STEPS = 2_000
#: Share of the time left that the first mode may take for its steps; the next one takes as long.
FIRST_SHARE = 0.45
HOOKS = ("pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block")
TAG = "memory"


def mixed(
    direct: Any, steps: int, layers: int, hidden: int, until: float
) -> tuple[int, list[tuple[str, int]]]:
    """Requests that come and go, until so many steps are made or the time is over: plain, steered,
    captured, both.

    The steps until then; (job, prompt tokens) of those that capture, in order.
    """
    from direct import request

    from midstream.schemas.base.tensors import from_numpy
    from midstream.schemas.requests.specs import StoredCapture, StoredSteering

    values = np.random.default_rng(0)
    names = direct.hold(
        [from_numpy(values.standard_normal(hidden).astype(np.float32)) for _ in range(VECTORS)]
    )
    choose = random.Random(1)
    captured = []
    number = 0
    while direct.steps < steps and time.monotonic() < until:
        while direct.live < LIVE and choose.random() < 0.6:
            number += 1
            prompt = [choose.randrange(4, 500) for _ in range(choose.randint(1, LONGEST))]
            generated = choose.randint(1, 2 * LONGEST)
            wish: dict[str, Any] = {}
            if choose.random() < 0.5:
                family, numbers = choose.choice(
                    [("add", []), ("replace", [0.5]), ("ablate", [1.0])]
                )
                where = sorted(choose.sample(range(layers), choose.randint(1, layers)))
                wish["steering"] = [
                    StoredSteering(
                        layers=where,
                        hook=choose.choice(HOOKS),
                        positions=choose.choice(["all", "all_prompt", [0]]),
                        family=family,
                        tensors=[choose.choice(names)],
                        scale=0.3,
                        numbers=numbers,
                    )
                ]
            if choose.random() < 0.5:
                hooks = choose.sample(HOOKS, choose.randint(1, 3))
                sites = {
                    hook: sorted(choose.sample(range(layers), choose.randint(1, layers)))
                    for hook in HOOKS
                    if hook in hooks
                }
                positions = choose.choice(["all", "all_prompt", "last_prompt", "all_generated"])
                wish["captures"] = [StoredCapture(sites=sites, positions=positions, tag=TAG)]
                captured.append((f"job{number}", len(prompt)))
            direct.add(request(number, prompt, generated, **wish))
        direct.step()
    made = direct.steps
    direct.drain()
    return made, captured


def families(direct: Any, layers: int) -> int:
    """How many tokens and log-probabilities of five requests change when a sixth is captured: its
    batch is of the other family.
    """
    from direct import request

    from midstream.schemas.requests.specs import StoredCapture

    everything = StoredCapture(sites={"post_block": list(range(layers))}, positions="all", tag=TAG)
    found = []
    for turn in range(2):
        for place, prompt in enumerate(kit.token_ids(6, 10, 500, seed=3)):
            wish = {"captures": [everything]} if turn and place == 5 else {}
            direct.add(request(place, prompt, 8, job=f"family{turn}x{place}", logprobs=1, **wish))
        direct.drain()
        found.append([direct.outputs[f"family{turn}x{place}.0.1"] for place in range(5)])
    return sum(
        one != other
        for mine, theirs in zip(*found, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )


def one_mode(asked: kit.Options) -> None:
    from direct import Direct

    from midstream.client.captures.reader import CaptureReader

    mode = asked.model
    sink = kit.Sink()
    folder = asked.out / mode
    most = LIVE * (LONGEST + 1)
    extra: dict[str, Any] = (
        {"compilation_config": {"cudagraph_mode": "NONE"}} if mode == "compiled" else {}
    )
    if asked.gpu:
        extra |= {
            name: value
            for name, value in kit.without_weights(asked).items()
            if name == "attention_backend"
        }
        extra |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28}
        if mode == "graphs":
            # one for every number of tokens that a step may have: padding could choose other matrix
            # kernels
            extra["cudagraph_capture_sizes"] = list(range(1, most + 1))
    sizes = {
        "engine.max_num_seqs": LIVE,
        "engine.max_num_batched_tokens": most,
        "engine.max_model_len": 64,
        "relay_url": sink.url,
    }
    dtype = "bfloat16" if asked.gpu else "float32"
    settings = kit.serving_settings(
        asked,
        folder,
        checkpoint("llama", asked.out / "llama"),
        **{"engine.enforce_eager": mode in ("eager", "again"), "engine.dtype": dtype},
        **sizes,
    )
    direct = Direct(settings, extra)
    layers = direct.engine.info.num_layers
    hidden = direct.engine.info.hidden_size
    decided = asked.out / "steps"
    until = float("inf")
    if mode == MODES[asked.gpu][0]:
        steps = STEPS[asked.tiny]
        until = time.monotonic() + FIRST_SHARE * asked.left
    else:
        while not decided.exists():
            time.sleep(0.05)
        steps = int(decided.read_text())
    if mode == "eager":
        steps = min(steps, EAGER_STEPS)
    began = time.monotonic()
    made, captured = mixed(direct, steps, layers, hidden, until)
    took = time.monotonic() - began
    steps = direct.steps
    if mode == MODES[asked.gpu][0]:
        kit.leave(decided, str(made))
    different = families(direct, layers)
    told = direct.status() | {
        "step_ms": took / steps * 1e3,
        "steps": steps,
        "families": different,
        "facts": direct.facts,
    }
    direct.close()
    sink.wait(len(captured), 60)
    rows = []
    places = []
    for number, (job, _) in enumerate(captured):
        with CaptureReader(settings.capture_root / TAG, job) as reader:
            positions = np.array(reader.positions(0))
            for hook in reader.hooks():
                for layer in reader.layers(hook=hook):
                    rows.append(reader.array(layer, hook).astype(np.float32))
                    places.append(np.stack([np.full_like(positions, number), positions], 1))
    np.save(asked.out / f"{mode}.npy", np.concatenate(rows))
    np.save(asked.out / f"{mode}.places.npy", np.concatenate(places))
    outputs = [[token for token, _ in direct.outputs[f"{job}.0.1"]] for job, _ in captured]
    prompts = [prompt_tokens for _, prompt_tokens in captured]
    kit.leave(asked.out / f"{mode}.tokens", json.dumps({"prompts": prompts, "outputs": outputs}))
    names = ("steps", "step_ms", "families", "idle_steps", "facts")
    facts = {name: told[name] for name in names if name in told} | {
        "failed": sink.failed,
        "captured": len(captured),
    }
    kit.leave(asked.out / f"{mode}.facts", json.dumps(facts))


def bits(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.int32)


def _common(tokens: list[int], others: list[int]) -> int:
    """Return how many tokens are the same from the beginning."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((place for place, (one, two) in pairs if one != two), len(tokens))


#: Of a request with other bits. Its rows must differ from the position on where its tokens do.
COLUMNS = ["request", "prompt tokens", "rows", "with other bits", "after equal tokens"]
COLUMNS += ["first at position", "tokens differ from position", "largest error"]
#: Requests that are shown.
SHOWN = 40


def compared(folder: Path, mode: str, other: str) -> tuple[dict[str, float], list[list[Any]]]:
    """Compare rows of two modes. Return figures, and of each request with other bits a row of
    `COLUMNS`.

    `rows`: how many; `wrong_rows`: those with other bits, or that one of them lacks;
    `rows_after_equal_tokens`: those of them that follow from the same tokens, of
    `requests_after_equal_tokens` requests; `rows_after_other_tokens`: the others, which must
    differ; `same_error`: the largest error of a row that follows from the same tokens, of its
    length; `other_tokens`: requests that generated other tokens, which depend on the last bit of a
    logit. Of eager steps, which are fewer, the same first requests.
    """
    first, second = (np.load(folder / f"{name}.npy") for name in (mode, other))
    if other == "eager":
        first = first[: len(second)]
    if first.shape != second.shape:
        longest = max(len(first), len(second))
        lacking = dict.fromkeys(("rows", "wrong_rows", "rows_after_equal_tokens"), float(longest))
        return lacking, []
    texts = [json.loads((folder / f"{name}.tokens").read_text()) for name in (mode, other)]
    outputs = list(zip(*(text["outputs"] for text in texts), strict=False))
    ends = np.array(
        [
            prompt + _common(*pair)
            for prompt, pair in zip(texts[0]["prompts"], outputs, strict=False)
        ]
    )
    places = np.load(folder / f"{mode}.places.npy")[: len(first)]
    same = places[:, 1] < ends[places[:, 0]]
    wrong = (bits(first) != bits(second)).any(1)
    lengths = np.maximum(np.linalg.norm(second, axis=1), 1e-6)
    errors = np.linalg.norm(first - second, axis=1) / lengths
    figures = {
        "rows": len(first),
        "wrong_rows": int(wrong.sum()),
        "rows_after_equal_tokens": int((wrong & same).sum()),
        "rows_after_other_tokens": int((wrong & ~same).sum()),
        "requests_after_equal_tokens": len(np.unique(places[wrong & same, 0])),
        "same_error": float(errors[same].max()),
        "other_tokens": sum(one != two for one, two in outputs),
    }
    requests = []
    for request in np.unique(places[wrong, 0]).tolist():
        of_it = places[:, 0] == request
        bad = wrong & of_it
        prompt = texts[0]["prompts"][request]
        until = int(ends[request])
        differ = "–" if until == prompt + len(outputs[request][0]) else until
        counts = [int(rows.sum()) for rows in (of_it, bad, bad & same)]
        first_bad = int(places[bad, 1].min())
        largest = f"{errors[bad].max():.2g}"
        requests.append([request, prompt, *counts, first_bad, differ, largest])
    return figures, requests


def main() -> None:
    asked = kit.options(__doc__)
    if asked.model in MODES[asked.gpu]:
        one_mode(asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    for left in asked.out.glob("*.facts"):
        left.unlink()
    (asked.out / "steps").unlink(missing_ok=True)
    checkpoint("llama", asked.out / "llama")  # before three processes write it
    result: dict[str, Any] = {"figures": {}, "notes": []}

    def keep(*notes: str, **figures: float) -> None:
        result["notes"] += notes
        result["figures"] |= {name: {"value": value} for name, value in figures.items()}
        kit.so_far(asked, result)

    modes = {mode: kit.start_mode(asked, __file__, mode) for mode in MODES[asked.gpu]}
    facts: dict[str, dict[str, Any]] = {}
    for mode in modes:
        facts[mode] = told = kit.ended(modes, mode, asked.out)
        keep(
            f"{mode}: {told['step_ms']:.2f} ms a step, {told.get('idle_steps', '?')} idle, "
            f"{told['facts']}"
        )
        if mode == "graphs":
            figures, requests = compared(asked.out, "graphs", "compiled")
            title = f"Requests with other bits than without graphs, {SHOWN} of {len(requests)}"
            shown = {"title": title, "columns": COLUMNS, "rows": requests[:SHOWN]}
            result["tables"] = [shown] if requests else []
            keep(steps=told["steps"], **figures)
            keep(family_differences=told["families"])
    last = "graphs" if asked.gpu else "again"
    of_eager, _ = compared(asked.out, last, "eager")
    if last == "again":
        keep(steps=facts[last]["steps"], **of_eager)
        keep(family_differences=facts[last]["families"])
    keep(
        f"{of_eager['wrong_rows']} of {of_eager['rows']} rows differ in their bits from eager "
        "steps'",
        eager_error=of_eager.get("same_error", float("inf")),
    )
    kit.finish(asked, result)


if __name__ == "__main__":
    main()
