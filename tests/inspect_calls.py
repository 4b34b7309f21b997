"""Run by tests/long/test_inspect.py in the environment of Inspect AI: evaluations against the service at `sys.argv[1]`, as JSON."""

import json
import sys
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool

URL, LOGS = sys.argv[1], sys.argv[2]
ASK = "Say something about the sea."
CONFIG = GenerateConfig(temperature=0, max_tokens=12, cache=False)
CAPTURE = {"layers": 10, "positions": "all_prompt"}
calls: list[str] = []


@tool
def weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        calls.append(city)
        return "sunny"

    return execute


def run(samples: list[Sample], solver: Any = None, config: GenerateConfig = CONFIG, **arguments: Any) -> dict[str, Any]:
    model = get_model("midstream/demo", base_url=URL, memoize=False, **arguments)
    task = Task(dataset=samples, solver=solver or generate())
    (log,) = eval(task, model=model, display="none", log_dir=LOGS, fail_on_error=False, **config.model_dump(exclude_none=True))
    return {
        str(sample.id): {
            "text": sample.output.completion, "error": sample.error and sample.error.message,
            "ours": (sample.output.metadata or {}).get("midstream"), "messages": [message.role for message in sample.messages],
            "cached": [event.cache for event in sample.events if event.event == "model"],
        }
        for sample in log.samples or []
    }  # fmt: skip


def one(name: str, **ours: Any) -> Sample:
    return Sample(id=name, input=ASK, metadata={"midstream": ours} if ours else {})


def refusals() -> list[str]:
    found = []
    for arguments in ({"moduls": "shift"}, {"steering": [{"layer": 3}]}, {"modules": 5}, {"per_sample": "no"}):
        try:
            get_model("midstream/demo", base_url=URL, memoize=False, **arguments)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def weather_of(city: str) -> Sample:
    return Sample(id="tools", input=f"What is the weather in {city}?")


longer = GenerateConfig(temperature=0, max_tokens=60)
cached = GenerateConfig(temperature=0, max_tokens=12, cache=True)
require = use_tools(weather(), tool_choice=ToolFunction("weather"))
print(
    json.dumps(
        {
            "samples": run([
                one("plain"), one("module", modules={"shift": 1.0}), one("captured", capture=CAPTURE), one("unknown", moduls="x"),
                one("missing", modules="nobody"), one("patched", patch=[{"layers": 10, "position": -1, "source": {"zeros": True}}]),
            ]),
            "model": run([one("module"), one("over", steering=[], modules=[])], modules={"shift": 1.0}),
            "ignored": run([one("graded", modules="shift")], per_sample=False),
            "cached": [run([one("plain", **ours)], config=cached) for ours in ({}, {}, {"modules": "shift"})],
            "tools": run([weather_of("Paris")], [require, generate(tool_calls="single")], longer),
            "called": calls,
            "refused": refusals(),
        }
    )
)  # fmt: skip
