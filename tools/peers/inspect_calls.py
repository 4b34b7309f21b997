"""Run by packages/bridges/tests/long/test_inspect.py in the environment of Inspect AI: evaluations
against the service at `sys.argv[1]`, as JSON.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, Literal

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool

from midstream.client import Client

URL = sys.argv[1]
LOGS = sys.argv[2]
ASK = "Say something about the sea."
CONFIG = GenerateConfig(temperature=0, max_tokens=12, cache=False)
CAPTURE = {"layers": 10, "positions": "all_prompt"}
calls: list[str] = []


@tool
def weather() -> Tool:
    async def execute(city: Literal["Paris", "Oslo"]) -> str:
        # the call is one of two, whatever the model is
        """The weather in a city.

        Args:
            city: Its name.
        """
        calls.append(city)
        return "sunny"

    return execute


def run(
    samples: list[Sample], solver: Any = None, config: GenerateConfig = CONFIG, **arguments: Any
) -> dict[str, Any]:
    return evaluated(
        get_model("midstream/demo", base_url=URL, memoize=False, **arguments),
        samples,
        solver or generate(),
        config,
    )


def evaluated(
    model: Model, samples: list[Sample], solver: Any, config: GenerateConfig
) -> dict[str, Any]:
    task = Task(dataset=samples, solver=solver)
    (log,) = eval(
        task,
        model=model,
        display="none",
        log_dir=LOGS,
        fail_on_error=False,
        **config.model_dump(exclude_none=True),
    )
    return {
        str(sample.id): {
            "text": sample.output.completion,
            "error": sample.error and sample.error.message,
            "ours": (sample.output.metadata or {}).get("midstream"),
            "messages": [message.role for message in sample.messages],
            "cached": [event.cache for event in sample.events if event.event == "model"],
        }
        for sample in log.samples or []
    }


def one(name: str, **ours: Any) -> Sample:
    return Sample(id=name, input=ASK, metadata={"midstream": ours} if ours else {})


def refusals() -> list[str]:
    found = []
    for arguments in (
        {"moduls": "shift"},
        {"steering": [{"layer": 3}]},
        {"modules": 5},
        {"per_sample": "no"},
    ):
        try:
            get_model("midstream/demo", base_url=URL, memoize=False, **arguments)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


class Refusing(BaseHTTPRequestHandler):
    """Answers each request with the next of `answers`: a status and seconds to wait.

    After the last one: an answer of a model.
    """

    answers: list[tuple[int, int]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, wait = self.answers.pop(0) if self.answers else (200, 0)
        problem = {"error": {"message": "not now", "type": "refused", "code": status}}
        message = {"role": "assistant", "content": "at last"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {
            "id": "job_1",
            "object": "chat.completion",
            "created": 0,
            "model": "demo",
            "choices": [choice],
        }
        body = json.dumps(answer if status == 200 else problem).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if wait:
            self.send_header("retry-after", str(wait))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def refused_at_first(*answers: tuple[int, int]) -> dict[str, Any]:
    """What becomes of a sample whose requests get `answers`; and what the provider says of each of
    them.
    """
    decisions: list[tuple[bool, str, float | None]] = []

    def observed(ex: BaseException) -> Any:
        decision = asked(ex)
        decisions.append((decision.retry, decision.kind, decision.retry_after))
        return decision

    Refusing.answers = list(answers)
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        model = get_model(
            "midstream/demo", base_url=f"http://127.0.0.1:{server.server_port}", memoize=False
        )
        model.api.should_retry, asked = observed, model.api.should_retry
        found = evaluated(model, [one("refused")], generate(), CONFIG)["refused"]
        server.shutdown()
    return found | {"decisions": decisions, "left": len(Refusing.answers)}


def keys() -> list[str | None]:
    """What Inspect's cache tells apart, after each change of what stands behind the names of a
    request; last, of a service that is away.
    """
    model = get_model("midstream/demo", base_url=URL, memoize=False, modules="keyed")
    found = []
    with Client(URL) as client:
        width = client.model("demo")["hidden_size"]
        for size in (1.0, 1.0, 2.0):
            client.modules.put("keyed", [{"layers": 1, "vector": [size] * width}])
            found.append(model.api.base_url)
        client.global_steering.put([{"layers": 1, "vector": [1e-6] * width}], "demo")
        found.append(model.api.base_url)
        client.global_steering.delete("demo")
        found.append(model.api.base_url)
    away = get_model("midstream/demo", base_url="http://127.0.0.1:9", memoize=False)
    return [*found, away.api.base_url, away.api.base_url]


def weather_of(city: str) -> Sample:
    return Sample(id="tools", input=f"What is the weather in {city}?")


longer = GenerateConfig(temperature=0, max_tokens=200)
cached = GenerateConfig(temperature=0, max_tokens=12, cache=True)
require = use_tools(weather(), tool_choice=ToolFunction("weather"))
print(
    json.dumps(
        {
            "samples": run(
                [
                    one("plain"),
                    one("module", modules={"shift": 1.0}),
                    one("captured", capture=CAPTURE),
                    one("unknown", moduls="x"),
                    one("missing", modules="nobody"),
                    one(
                        "patched", patch=[{"layers": 10, "position": -1, "source": {"zeros": True}}]
                    ),
                ]
            ),
            "model": run(
                [one("module"), one("over", steering=[], modules=[])], modules={"shift": 1.0}
            ),
            "ignored": run([one("graded", modules="shift")], per_sample=False),
            "cached": [
                run([one("plain", **ours)], config=cached)
                for ours in ({}, {}, {"modules": "shift"})
            ],
            "tools": run([weather_of("Paris")], [require, generate(tool_calls="single")], longer),
            "called": calls,
            "keys": keys(),
            "refused": refusals(),
            "patient": refused_at_first((429, 7), (503, 2)),
            "failed": refused_at_first((500, 0), (500, 0)),
        }
    )
)
