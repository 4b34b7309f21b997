"""Answers of stock vLLM's server and of Midstream to the same call, brought into one form and
compared field by field.

Not compared: ids and times, the wording of errors, where a stream is cut into chunks, and what only
one of the two reports of itself (`IGNORED`). A field that is null and one that is left out count as
equal. Numbers may differ by `TOLERANCE`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from openai_calls import Call
from ports import free_port

from midstream_ops.demo_model import fetch_demo_model

#: Log-probabilities are computed in float32 on both sides, in batches and with cached blocks that
#: may differ.
TOLERANCE = 1e-3
#: Members of an answer that say nothing of the call's result.
IGNORED = {
    "id", "created", "system_fingerprint", "prompt_tokens_details", "completion_tokens_details",
    "capture_results", "determinism", "service_tier", "metrics",
}  # fmt: skip
#: vLLM's own server and our worker get the same engine.
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16}
TOOL_PARSER = "hermes"
START_S = 400.0
CALL_S = 300.0


@contextmanager
def stock_server(folder: Path) -> Iterator[str]:
    """The URL of `vllm serve` with the demo model, as a process of its own."""
    port = free_port()
    flags = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "demo",
        "generation-config": "vllm",
        "block-size": 32,
        "kv-cache-memory-bytes": 1 << 29,
        "tool-call-parser": TOOL_PARSER,
        "structured-outputs-config": '{"backend": "xgrammar"}',
        **{name.replace("_", "-"): value for name, value in ENGINE.items()},
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(fetch_demo_model()),
    ]
    command += ["--enforce-eager", "--enable-auto-tool-choice"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    environment = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (
        (folder / "stock.log").open("wb") as log,
        # a session of its own: its engine is a process of its own, which outlives a killed server
        subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"vllm serve did not start: {(folder / 'stock.log').read_text()[-2000:]}"
                    )
                try:
                    if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def answer(url: str, call: Call) -> dict[str, Any]:
    """The server's answer in the form that is compared."""
    response = httpx2.post(f"{url}/v1/{call.path}", json=call.body, timeout=CALL_S)
    if response.status_code != 200:
        return {"status": response.status_code}
    if not call.body.get("stream"):
        whole = response.json()
        whole["choices"] = {str(choice["index"]): _choice(choice) for choice in whole["choices"]}
        return {"status": 200, **_without_nulls(whole)}
    lines = [
        line.removeprefix("data: ")
        for line in response.text.splitlines()
        if line.startswith("data: ")
    ]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    if any("error" in chunk for chunk in chunks):
        return {
            "status": next(
                int(chunk["error"].get("code") or 500) for chunk in chunks if "error" in chunk
            )
        }
    return {"status": 200, "done": lines[-1] == "[DONE]", **_without_nulls(_joined(chunks))}


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two answers differ, and by what."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for name in sorted({*one, *other})
            for found in differences(one.get(name), other.get(name), f"{at}.{name}" if at else name)
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            found
            for place, (a, b) in enumerate(zip(one, other, strict=True))
            for found in differences(a, b, f"{at}[{place}]")
        ]
    numbers = isinstance(one, float | int) and isinstance(other, float | int)
    same = (
        abs(one - other) <= TOLERANCE
        if numbers and (isinstance(one, float) or isinstance(other, float))
        else one == other
    )
    return (
        []
        if same
        else [f"{at}: stock {json.dumps(one)[:200]}, Midstream {json.dumps(other)[:200]}"]
    )


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    choice = {**choice.pop("message", {}), **choice}
    choice["tool_calls"] = [
        _call(number, call) for number, call in enumerate(choice.get("tool_calls") or [])
    ] or None
    return choice


def _call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Ids are drawn at random: only their form is compared."""
    return {"index": number, **call, "id": (call.get("id") or "").rpartition("-")[0]}


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of all chunks: texts and lists one after the other."""
    whole: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                whole[name] = value
        for part in chunk["choices"]:
            part = {**part.pop("delta", {}), **part}
            _extend(whole["choices"].setdefault(str(part["index"]), {"index": part["index"]}), part)
    for choice in whole["choices"].values():
        if choice.get("tool_calls"):
            choice["tool_calls"] = [
                _call(number, call) for number, call in choice["tool_calls"].items()
            ]
    return whole


def _extend(known: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "tool_calls":
            calls = known.setdefault("tool_calls", {})
            for call in value or []:
                entry = calls.setdefault(call["index"], {"function": {}})
                entry["function"] = {
                    **entry["function"],
                    **{
                        k: entry["function"].get(k, "") + v
                        for k, v in call["function"].items()
                        if v
                    },
                }
                entry |= {k: v for k in ("id", "type") if (v := call.get(k))}
        elif name == "logprobs" and value is not None:
            _extend(known.setdefault("logprobs", {}), value)
        elif name in ("text", "content") and isinstance(value, str):
            known[name] = known.get(name, "") + value
        elif isinstance(value, list) and name != "prompt_token_ids":
            known[name] = [*known.get(name, []), *value]
        elif value is not None:
            known[name] = value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(inner)
            for name, inner in value.items()
            if inner is not None and name not in IGNORED
        }
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
