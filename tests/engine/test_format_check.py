"""The process that tries constraints before the engine gets them: what it refuses depends on size,
or would never end on any machine.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from midstream.schemas.base.errors import MidstreamError
from midstream.workers.engine.prompts import format_check
from midstream_ops.demo_model import fetch_demo_model

MANY = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string"} for number in range(2200)},
}
TOOLS = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "object", "properties": {f"a{n}": {"type": "string"}}} for n in range(128)
        ]
    },
}


async def outcomes(
    *forms: dict[str, Any], seconds: float = 2.0, model: str = "", memory: int = format_check.MEMORY
) -> list[str]:
    """For each constraint, asked of the same process, why it is refused, or an empty text."""
    checker = format_check.FormatChecker(
        model or str(fetch_demo_model()), 49152, seconds, memory=memory
    )
    await checker.begin()
    found = []
    try:
        for form in forms:
            wanted = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
            try:
                await checker.check(wanted)
                found.append("")
            except MidstreamError as error:
                found.append(str(error))
    finally:
        await checker.close()
    return found


@pytest.mark.long
async def test_a_constraint_of_too_many_rules_is_refused() -> None:
    many, ambiguous, grammar = await outcomes(
        {"json": MANY},
        {"regex": "(a|b|ab)*" * 200},
        {
            "grammar": "\n".join(
                [
                    "root ::= r0",
                    *(f'r{n} ::= "a" r{n + 1} | "b"' for n in range(150)),
                    'r150 ::= "c"',
                ]
            )
        },
    )
    assert "2220 rules" in many
    assert "401 rules" in ambiguous
    assert "rules" in grammar


@pytest.mark.matrix
async def test_what_would_occupy_the_engine_is_refused_and_the_next_is_served() -> None:
    slower, empty, after = await outcomes(
        {"regex": "((a*)*)*"},  # each token takes longer than the one before
        {"grammar": 'root ::= root root root | root root | "a" | "ab" | "b" | ""'},
        {"regex": "(yes|no){3}"},
    )
    assert all("processor time" in each for each in (slower, empty))
    assert after == ""


@pytest.mark.long
async def test_ordinary_constraints_pass() -> None:
    forms: dict[str, dict[str, Any]] = {
        "tools": {"json": TOOLS},
        "object": {"json_object": True},
        "choices": {"choice": [f"word {n}" for n in range(1000)]},
        "ebnf": {"grammar": 'root ::= "a" ("b" | "c") "d"'},
        "lark": {"grammar": "start: WORD\nWORD: /[a-z]+/"},
        "tag": {
            "structural_tag": (
                '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": '
                '{"type": "object"}}}'
            )
        },
        "broken: vLLM says why": {"regex": "[("},
    }
    assert dict(
        zip(forms, await outcomes(*forms.values(), seconds=60.0), strict=True)
    ) == dict.fromkeys(forms, "")


@pytest.mark.matrix
async def test_a_constraint_that_needs_more_memory_than_there_is_is_refused() -> None:
    # less than the process has already
    (refused,) = await outcomes({"json": TOOLS}, seconds=60.0, memory=1 << 20)
    assert "or 0.000976562 GiB" in refused


@pytest.mark.matrix
async def test_a_process_that_does_not_start_is_no_fault_of_the_request(tmp_path: Path) -> None:
    (failed,) = await outcomes({"regex": "a"}, model=str(tmp_path))  # no tokenizer there
    assert failed.startswith("the process that checks constraints ended with 1")
