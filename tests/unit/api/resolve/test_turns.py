"""Are the turns of a conversation found where the chat templates that people use render them?

The templates have the form of the published ones, as of 2026-08, that their first lines name.
"""

import asyncio
from ast import literal_eval
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from model_kit import model
from refusal_kit import refuses
from spelling import byte_level, covering
from test_images import URL, picture
from test_spans import merged_byte_level

from midstream.api.resolve.admission.admission import facts_of, tokenise
from midstream.api.resolve.admission.costs import RENDER_COST, check_cost
from midstream.api.resolve.edits.steering import _check_global_positions
from midstream.api.resolve.positions.captures import Bounds, resolve_captures
from midstream.api.resolve.prompts.request_parsing import ParsedRequest, parse_chat, parse_job
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.broker.prompts.turns import shared_length
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import JobRequest
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.jobs.openai import ChatRequest
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.requests.specs import CaptureSpec

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
#: Template → its first token, and the one that ends an answer.
TOKENS = {
    "command-r7b": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek-r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma2": ("<bos>", "<eos>"),
    "glm4.5": ("", "<|endoftext|>"),
    "gpt-oss": ("<|startoftext|>", "<|return|>"),
    "granite3.3": ("<|end_of_text|>", "<|end_of_text|>"),
    "hermes3": ("<|begin_of_text|>", "<|im_end|>"),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral-small": ("<s>", "</s>"),
    "mistral-v3": ("<s>", "</s>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "qwen2.5": ("<|im_start|>", "<|im_end|>"),  # as SmolLM2's, which begins messages with it
    "qwen3": ("", "<|im_end|>"),
    "qwen3.5": ("", "<|im_end|>"),
    "zephyr": ("<s>", "</s>"),
}
#: Templates that leave out white space around contents, of these roles.
TRIMMED = {
    "gemma2": {"user", "assistant"},
    "glm4.5": {"assistant"},
    "llama3.1": {"system", "user", "assistant"},
    "mistral-v3": {"assistant"},
    "qwen3.5": {"system", "user", "assistant"},
}
#: Tokens that the tokenizers of templates have.
SPECIAL = {
    "granite3.3": ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
    "mistral-small": [
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ],
}
CALL = {"id": "abcdefghi", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It."}}
SHOWN_TOOL = (
    '{"type": "function", "function": '
    '{"name": "weather", "description": "It.", "parameters": null}}'
)
SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
THOUGHT = HELLO | {"reasoning": "A greeting."}
CALLED = [HI, {"role": "assistant", "tool_calls": [CALL]}]
ANSWERED = [*CALLED, {"role": "tool", "content": "12 C", "tool_call_id": "abcdefghi"}]


@cache
def codec_of(template: str, text: str = "", parts: bool = False) -> Codec:
    tokenizer = merged_byte_level()
    tokenizer.add_special_tokens(SPECIAL.get(template, []))
    bos, eos = TOKENS.get(template, ("", ""))
    return Codec(
        TokenizerBundle(
            tokenizer_json=tokenizer.to_str(),
            chat_template=text or (TEMPLATES / f"{template}.jinja").read_text(),
            special_tokens={"bos_token": bos, "eos_token": eos},
            eos_token_ids=[],
            parts=parts,
        )
    )


def asked(messages: list[dict[str, Any]], span: dict[str, Any], **fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": messages, **fields}
    parsed = parse_chat(from_json(to_json(body), ChatRequest))
    return replace(parsed, capture=CaptureSpec(positions=[from_json(to_json(span), Span)]))


def found(codec: Codec, parsed: ParsedRequest, **facts: Any) -> tuple[str, list[int], list[bytes]]:
    """The rendered text, the positions that the request's capture has, and each token's bytes."""
    info = model(vocab_size=1 << 20, max_model_len=1 << 20, **facts)
    prompts = asyncio.run(tokenise(parsed.prompts, info, codec))
    facts, _ = asyncio.run(facts_of(parsed, prompts, info, codec))
    bounds = Bounds(info, facts)
    positions = resolve_captures(parsed.capture, bounds, [])[0][0].positions
    names = [codec._tokenizer.id_to_token(token) for token in prompts[0].token_ids]
    special = {"<s>", "</s>"}.union(*SPECIAL.values())
    return prompts[0].text, positions, [byte_level(name, special) for name in names]


QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + SHOWN_TOOL
    + "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GPT_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, "
    "final. Channel must be included for every message."
)
LLAMA_SYSTEM = (
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
)
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
#: Template, messages and other fields; the rendered text, cut by hand into pieces; span → the
#: numbers of its pieces.
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any], list[str], dict[str, list[int]]]] = [
    (
        "qwen2.5",  # its own system prompt is in no message
        [HI, HELLO, HI],
        {},
        [
            f"<|im_start|>system\n{QWEN_SYSTEM}<|im_end|>\n",
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n"),
            *("<|im_start|>assistant\n", "Hello.", "<|im_end|>\n"),
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n", "<|im_start|>assistant\n"),
        ],
        {
            "{'turn': 0}": [2],
            "{'role': 'user'}": [2, 8],
            "{'turn': -1, 'role': 'user'}": [8],
            "{'turn': 0, 'part': 'header'}": [1],
            "{'turn': 0, 'part': 'all'}": [1, 2, 3],
            "{'turn': 1, 'part': 'all'}": [4, 5, 6],
            "{'turn': -1, 'part': 'all'}": [7, 8, 9],
        },
    ),
    (
        "qwen2.5",
        [SYSTEM, *ANSWERED],
        {"tools": [TOOL]},
        [
            *("<|im_start|>system\n", "Be brief.", "\n\n" + QWEN_TOOLS, "<|im_end|>\n"),
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n"),
            *("<|im_start|>assistant\n", QWEN_CALL, "<|im_end|>\n"),
            *("<|im_start|>user\n<tool_response>\n", "12 C", "\n</tool_response><|im_end|>\n"),
            "<|im_start|>assistant\n",
        ],
        {
            "{'part': 'tools'}": [2],
            "{'role': 'system', 'part': 'all'}": [0, 1, 2, 3],
            "{'part': 'tool_calls'}": [8],
            "{'turn': 2, 'part': 'all'}": [7, 8, 9],
            "{'role': 'tool'}": [11],
            "{'role': 'tool', 'part': 'header'}": [10],
        },
    ),
    (
        "qwen3",
        [HI, THOUGHT],
        {"add_generation_prompt": False, "continue_final_message": True},
        [
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n"),
            *("<|im_start|>assistant\n<think>\n", "A greeting.", "\n</think>\n\n", "Hello."),
        ],
        {
            "{'part': 'reasoning'}": [4],
            "{'turn': -1}": [6],
            "{'turn': -1, 'part': 'header'}": [3],
            "{'turn': -1, 'part': 'all'}": [3, 4, 5, 6],
        },
    ),
    (
        "qwen3",
        CALLED,
        {"tools": [TOOL], "add_generation_prompt": False},
        [
            "<|im_start|>system\n" + QWEN_TOOLS + "<|im_end|>\n",
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n"),
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            *(QWEN_CALL, "<|im_end|>\n"),
        ],
        {
            "{'part': 'tools'}": [0],
            "{'part': 'tool_calls'}": [5],
            "{'turn': -1, 'part': 'all'}": [4, 5, 6],
        },
    ),
    (
        "llama3.1",  # writes a system message with dates, and trims
        [SYSTEM, HI, HELLO | {"content": "\n Hello. "}, HI],
        {},
        [
            *("<|begin_of_text|>", LLAMA_SYSTEM, "Be brief.", "<|eot_id|>"),
            *(LLAMA_USER, "Hi", "<|eot_id|>", LLAMA_ANSWER, "Hello.", "<|eot_id|>"),
            *(LLAMA_USER, "Hi", "<|eot_id|>", LLAMA_ANSWER),
        ],
        {
            "{'role': 'system'}": [2],
            "{'role': 'system', 'part': 'header'}": [1],
            "{'turn': 1, 'role': 'user'}": [11],
            "{'role': 'assistant'}": [8],
            "{'role': 'user', 'part': 'all'}": [4, 5, 6, 10, 11, 12],
        },
    ),
    (
        "llama3.1",
        CALLED,
        {"add_generation_prompt": False},
        [
            *("<|begin_of_text|>", LLAMA_SYSTEM, "<|eot_id|>", LLAMA_USER, "Hi", "<|eot_id|>"),
            *(LLAMA_ANSWER, '{"name": "weather", "parameters": {"city": "Oslo"}}', "<|eot_id|>"),
        ],
        {
            "{'part': 'tool_calls'}": [7],
            "{'turn': 0, 'part': 'all'}": [3, 4, 5],
            "{'turn': 1, 'part': 'all'}": [6, 7, 8],
        },
    ),
    (
        "mistral-v3",
        [*ANSWERED, HELLO, HI | {"content": "And now?"}],
        {"tools": [TOOL]},
        [
            *("<s>", "[INST] ", "Hi", "[/INST]"),
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]',
            *("</s>", '[TOOL_RESULTS] {"content": ', "12 C", ', "call_id": "abcdefghi"}'),
            *("[/TOOL_RESULTS]", " ", "Hello.", "</s>"),
            f"[AVAILABLE_TOOLS] [{SHOWN_TOOL}][/AVAILABLE_TOOLS]",
            *("[INST] ", "And now?", "[/INST]"),
        ],
        {
            "{'part': 'tool_calls'}": [4],
            "{'part': 'tools'}": [13],
            "{'role': 'tool'}": [7],
            "{'role': 'assistant'}": [11],
            "{'turn': -1, 'part': 'header'}": [13, 14],
            "{'turn': -2, 'part': 'all'}": [10, 11, 12],
        },
    ),
    (
        "mistral-v3",  # the system prompt is in the last user's turn
        [SYSTEM, HI],
        {},
        ["<s>[INST] ", "Be brief.", "\n\n", "Hi", "[/INST]"],
        {"{'role': 'system'}": [1], "{'role': 'user'}": [3]},
    ),
    (
        "gemma2",  # calls the assistant `model`
        [HI, HELLO | {"content": " Hello.\n"}, HI],
        {},
        [
            *("<bos>", "<start_of_turn>user\n", "Hi", "<end_of_turn>\n"),
            *("<start_of_turn>model\n", "Hello.", "<end_of_turn>\n"),
            *("<start_of_turn>user\n", "Hi", "<end_of_turn>\n", "<start_of_turn>model\n"),
        ],
        {
            "{'role': 'assistant'}": [5],
            "{'role': 'assistant', 'part': 'all'}": [4, 5, 6],
            "{'turn': 0, 'part': 'header'}": [1],
            "{'turn': -1, 'part': 'all'}": [7, 8, 9],
        },
    ),
    (
        "phi3",  # ends a conversation without a question with another token
        [SYSTEM, HI, HELLO | {"content": " Hello. "}, HI],
        {},
        [
            *("<|system|>\n", "Be brief.", "<|end|>\n", "<|user|>\n", "Hi", "<|end|>\n"),
            *("<|assistant|>\n", " Hello. ", "<|end|>\n", "<|user|>\n", "Hi", "<|end|>\n"),
            "<|assistant|>\n",
        ],
        {
            "{'turn': 0, 'part': 'all'}": [0, 1, 2],
            "{'role': 'assistant'}": [7],
            "{'role': 'assistant', 'part': 'all'}": [6, 7, 8],
            "{'turn': -1, 'part': 'all'}": [9, 10, 11],
        },
    ),
    (
        "deepseek-r1",
        [SYSTEM, HI, HELLO, HI],
        {},
        [
            *("<｜begin▁of▁sentence｜>", "Be brief.", "<｜User｜>", "Hi", "<｜Assistant｜>"),
            *("Hello.", "<｜end▁of▁sentence｜>", "<｜User｜>", "Hi", "<｜Assistant｜><think>\n"),
        ],
        {
            "{'role': 'system', 'part': 'all'}": [1],
            "{'turn': 1, 'part': 'all'}": [2, 3],
            "{'role': 'assistant'}": [5],
            "{'role': 'assistant', 'part': 'all'}": [4, 5, 6],
        },
    ),
    (
        "zephyr",
        [SYSTEM, HI, HELLO],
        {"add_generation_prompt": False},
        [
            *("<|system|>\n", "Be brief.", "</s>\n", "<|user|>\n", "Hi", "</s>\n"),
            *("<|assistant|>\n", "Hello.", "</s>\n"),
        ],
        {
            "{'part': 'content'}": [1, 4, 7],
            "{'part': 'header'}": [0, 3, 6],
            "{'turn': -1, 'part': 'all'}": [6, 7, 8],
        },
    ),
    (
        "gpt-oss",  # ends the last answer with another token, and writes a system message itself
        [SYSTEM, HI, HELLO, HI],
        {"tools": [TOOL]},
        [
            GPT_SYSTEM + "\nCalls to these tools must go to the commentary channel: 'functions'.",
            *("<|end|>", "<|start|>developer<|message|># Instructions\n\n", "Be brief.", "\n\n"),
            *("# Tools\n\ntype weather = () => any;<|end|>", "<|start|>user<|message|>", "Hi"),
            *("<|end|>", "<|start|>assistant<|channel|>final<|message|>", "Hello.", "<|end|>"),
            *("<|start|>user<|message|>", "Hi", "<|end|>", "<|start|>assistant"),
        ],
        {
            "{'role': 'system', 'part': 'header'}": [2],
            "{'role': 'system', 'part': 'all'}": [2, 3, 4, 5],
            "{'role': 'assistant', 'part': 'all'}": [9, 10, 11],
            "{'turn': -1, 'part': 'all'}": [12, 13, 14],
        },
    ),
    (
        "hermes3",  # ends the last answer of a tool in another way
        [SYSTEM, *ANSWERED, HELLO],
        {"tools": [TOOL], "add_generation_prompt": False},
        [
            "<|begin_of_text|><|im_start|>system\nHere are the available tools: <tools> "
            '{"name": "weather", "description": "It.", "parameters": null} </tools><|im_end|>\n',
            *("<|im_start|>system\n", "Be brief.", "<|im_end|>\n"),
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n", "<|im_start|>assistant\n"),
            *(QWEN_CALL, "<|im_end|>\n", "<|im_start|>tool\n<tool_response>\n", "12 C"),
            *(
                "\n</tool_response>\n<|im_end|>",
                "<|im_start|>assistant\n",
                "Hello.",
                "<|im_end|>\n",
            ),
        ],
        {
            "{'turn': 0, 'part': 'header'}": [1],
            "{'turn': 0, 'part': 'all'}": [1, 2, 3],
            "{'part': 'tool_calls'}": [8],
            "{'role': 'tool', 'part': 'all'}": [10, 11, 12],
            "{'turn': -1, 'part': 'header'}": [13],
        },
    ),
    (
        "mistral-small",  # what it writes for tools has the same ends as its neighbours
        [SYSTEM, *ANSWERED],
        {"tools": [TOOL]},
        [
            *("<s>", "[SYSTEM_PROMPT]", "Be brief.", "[/SYSTEM_PROMPT]"),
            *(f"[AVAILABLE_TOOLS][{SHOWN_TOOL}][/AVAILABLE_TOOLS]", "[INST]", "Hi", "[/INST]"),
            *('[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', "</s>"),
            *("[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]", "12 C", "[/TOOL_RESULTS]"),
        ],
        {
            "{'part': 'tools'}": [4],
            "{'part': 'tool_calls'}": [8],
            "{'turn': 0, 'part': 'all'}": [1, 2, 3],
            "{'turn': 1, 'part': 'header'}": [4, 5],
        },
    ),
    (
        "granite3.3",
        [SYSTEM, HI],
        {"tools": [TOOL]},
        [
            *("<|start_of_role|>system<|end_of_role|>", "Be brief.", "<|end_of_text|>\n"),
            "<|start_of_role|>available_tools<|end_of_role|>[\n    {\n        "
            '"type": "function",\n        "function": {\n            "name": "weather",\n'
            '            "description": "It.",\n            "parameters": null\n        }\n    }\n]'
            "<|end_of_text|>\n",
            *("<|start_of_role|>user<|end_of_role|>", "Hi", "<|end_of_text|>\n"),
            "<|start_of_role|>assistant<|end_of_role|>",
        ],
        {"{'part': 'tools'}": [3], "{'role': 'user'}": [5]},
    ),
    (
        "glm4.5",  # begins every text with tokens that are no BOS, and ends messages with nothing
        [SYSTEM, HI, THOUGHT],
        {"add_generation_prompt": False},
        [
            *("[gMASK]<sop>", "<|system|>\n", "Be brief.", "<|user|>\n", "Hi"),
            *("<|assistant|>\n<think>", "A greeting.", "</think>\n", "Hello."),
        ],
        {
            "{'part': 'reasoning'}": [6],
            "{'turn': 0, 'part': 'header'}": [1],
            "{'turn': 0, 'part': 'all'}": [1, 2],
            "{'turn': 1, 'part': 'all'}": [3, 4],
            "{'turn': 2, 'part': 'all'}": [5, 6, 7, 8],
        },
    ),
    (
        "qwen2.5",  # the system prompt that the template has by itself, sent
        [{"role": "system", "content": QWEN_SYSTEM}, HI],
        {},
        [
            *("<|im_start|>system\n", QWEN_SYSTEM, "<|im_end|>\n"),
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n", "<|im_start|>assistant\n"),
        ],
        {"{'turn': 0, 'part': 'header'}": [0], "{'turn': 0, 'part': 'all'}": [0, 1, 2]},
    ),
    (
        "qwen3.5",  # takes no conversation without a question
        [SYSTEM, HI, HELLO | {"content": " Hello.\n"}, HI],
        {},
        [
            *("<|im_start|>system\n", "Be brief.", "<|im_end|>\n"),
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n"),
            *("<|im_start|>assistant\n", "Hello.", "<|im_end|>\n"),
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n", "<|im_start|>assistant\n<think>\n"),
        ],
        {
            "{'role': 'system', 'part': 'all'}": [0, 1, 2],
            "{'turn': 1, 'part': 'header'}": [3],
            "{'turn': 1, 'part': 'all'}": [3, 4, 5],
            "{'role': 'assistant'}": [7],
        },
    ),
    (
        "qwen3",  # ends a conversation with the reasoning that it drops from an earlier turn
        [HI, CALLED[1] | {"reasoning": "So"}, HI],
        {"add_generation_prompt": False},
        [
            *("<|im_start|>user\n", "Hi", "<|im_end|>\n", "<|im_start|>assistant\n"),
            *(QWEN_CALL, "<|im_end|>\n", "<|im_start|>user\n", "Hi", "<|im_end|>\n"),
        ],
        {
            "{'turn': 1, 'part': 'all'}": [3, 4, 5],
            "{'turn': -1, 'part': 'header'}": [6],
        },
    ),
]


@pytest.mark.parametrize(
    ("template", "messages", "fields", "pieces", "spans"),
    CASES,
    ids=[f"{case[0]}-{len(case[1])}" for case in CASES],
)
def test_turns_equal_spans_cut_by_hand(
    template: str,
    messages: list[dict[str, Any]],
    fields: dict[str, Any],
    pieces: list[str],
    spans: dict[str, list[int]],
) -> None:
    codec = codec_of(template)
    ends = [0, *accumulate(map(len, pieces))]
    for span, numbers in spans.items():
        parsed = asked(messages, literal_eval(span), **fields)
        text, positions, spelled = found(codec, parsed)
        assert text == "".join(pieces)
        places = [(ends[number], ends[number + 1]) for number in numbers]
        assert positions == covering(spelled, text, places), span


@pytest.mark.parametrize(
    ("template", "messages", "fields", "span", "words"),
    [
        ("deepseek-r1", [HI, THOUGHT, HI], {}, {"part": "reasoning"}, "message 1 is not in the"),
        ("qwen3", [HI, THOUGHT, HI], {}, {"part": "reasoning"}, "the chat template drops it"),
        (
            "deepseek-r1",
            [HI, HELLO | {"content": "<think>So</think>Hello."}, HI],
            {},
            {"turn": 1},
            "or a part of it",
        ),
        (
            "qwen3",
            [HI, HELLO | {"content": "<think>So</think>Hello."}, HI],
            {},
            {"turn": 1, "part": "header"},
            "writes no content after it, or a part of it",
        ),
        ("mistral-v3", [SYSTEM, HI], {}, {"turn": 0, "part": "header"}, "within a message of the"),
        # the template opens an answer whatever it is asked to
        ("command-r7b", [SYSTEM, HI, HELLO], {}, {"part": "all"}, "opens an answer unasked"),
        ("command-r7b", [HI, HELLO, HI], {}, {"turn": 1, "part": "header"}, "opens an answer"),
        ("mistral-v3", [SYSTEM, HI, HELLO, HI], {}, {"turn": 0}, "puts it behind a later message"),
        (
            "mistral-v3",
            [SYSTEM, HI, HELLO, HI],
            {},
            {"turn": -1, "part": "all"},
            "puts message 0 there as well",
        ),
        (
            "mistral-v3",
            [SYSTEM, HI, HELLO, HI],
            {},
            {"turn": 0, "part": "all"},
            "writes it within a message of the user",
        ),
        # the template takes equal messages for one
        (
            "mistral-v3",
            [HI, HELLO, HI],
            {"tools": [TOOL]},
            {"turn": 0},
            "renders this conversation",
        ),
        (
            "llama3.1",
            [HI, HELLO, HI],
            {"tools": [TOOL]},
            {"part": "tools"},
            "writes other text with them",
        ),
        (
            "llama3.1",
            [HI, HELLO, HI],
            {"tools": [TOOL]},
            {"turn": 0, "part": "all"},
            "writes another one than before later messages",
        ),
        ("phi3", ANSWERED, {}, {"part": "tool_calls"}, "drops them or writes other text"),
        ("phi3", ANSWERED, {}, {"turn": 1, "part": "header"}, "writes no content after it"),
        ("phi3", ANSWERED, {}, {"turn": 1}, "content of message 1 is empty"),
        ("phi3", [HI | {"content": " \n"}], {}, {"turn": 0}, "content of message 0 is empty"),
        ("phi3", [HI | {"content": ""}], {}, {"part": "all"}, "writes no content after it"),
        ("phi3", [HI], {}, {"part": "tools"}, "there are none"),
        (
            "phi3",
            [HI],
            {},
            {"role": "system"},
            "no turn with role 'system': the conversation has user (",
        ),
        ("phi3", [HI, HELLO], {}, {"turn": 2}, "no turn 2: the conversation has user, assistant ("),
        ("phi3", [HI, HELLO], {}, {"turn": -2, "role": "user"}, "no turn -2 with role 'user'"),
        ("phi3", [HI], {}, {"turn": 0, "part": "reasoning"}, "reasoning of message 0 is empty"),
        ("qwen3", ANSWERED, {}, {"turn": 1, "part": "all"}, "ends is unknown"),
        (
            "deepseek-r1",
            [SYSTEM, HI],
            {},
            {"turn": 0, "part": "header"},
            "is empty: it has no token",
        ),
    ],
)
def test_a_turn_that_is_not_rendered_as_sent_is_refused(
    template: str, messages: Any, fields: dict[str, Any], span: dict[str, Any], words: str
) -> None:
    with refuses(words) as refused:
        found(codec_of(template), asked(messages, span, **fields))
    assert refused.value.field.startswith("capture.positions[0]")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "repeats it"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "rewrites it"),
        (
            "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
            "renders this",
        ),
    ],
)
def test_templates_that_repeat_rewrite_or_measure_are_refused(template: str, words: str) -> None:
    with refuses(words):
        found(codec_of("", template), asked([HI], {"turn": 0}))


#: Writes a system prompt of its own if none is sent; ends messages of the user as `end` says, and
#: leaves out an empty answer at the end.
OWN_PROMPT = """\
{%- if messages[0].role != 'system' %}{{ '<10>System\n' }}OWN{{ '\n' }}{% endif %}
{%- for m in messages %}{% if m.content or m.role != 'assistant' or not loop.last %}
{{- ('<10>' if m.role == 'system' else '<11>') + (m.role | capitalize) + '\n' + m.content }}
{{- '<12>\n' if m.role == 'assistant' else '\n' if m.role == 'system' else 'END' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<11>Assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("own", ["", "Be kind."])
@pytest.mark.parametrize("part", ["header", "all"])
def test_a_system_message_begins_where_the_templates_own_would(own: str, part: str) -> None:
    codec = codec_of("", OWN_PROMPT.replace("END", "\n").replace("OWN", own))
    parsed = asked([SYSTEM, HI], {"role": "system", "part": part})
    text, positions, spelled = found(codec, parsed)
    stop = text.index("Be brief.") if part == "header" else text.index("<11>")
    assert positions == covering(spelled, text, [(0, stop)])


@pytest.mark.parametrize("part", ["header", "all"])
def test_a_system_message_after_which_messages_end_with_nothing_is_refused(part: str) -> None:
    codec = codec_of("", OWN_PROMPT.replace("END", "").replace("OWN", "Be kind."))
    with refuses("may have written a part of it by itself"):
        found(codec, asked([SYSTEM, HI], {"role": "system", "part": part}))


def test_a_template_that_writes_a_message_before_the_system_message() -> None:
    template = "{{ '<10>Model\nM\n' }}" + OWN_PROMPT.replace("END", "\n").replace("OWN", "Own")
    with refuses("may have written a part of it by itself"):
        found(codec_of("", template), asked([SYSTEM, HI], {"role": "system", "part": "all"}))


def test_an_empty_answer_that_ends_no_conversation_has_an_unknown_end() -> None:
    codec = codec_of("", OWN_PROMPT.replace("END", "\n"))
    messages = [HI, {"role": "assistant", "content": ""}, HI | {"content": ""}]
    for span in ({"role": "user", "part": "all"}, {"role": "assistant", "part": "all"}):
        with refuses("where message 1 ends is unknown"):
            found(codec, asked(messages, span))
    # what follows shows where it ends
    text, positions, spelled = found(codec, asked([*messages[:2], HI], {"turn": 1, "part": "all"}))
    start = text.index("<11>Assistant")
    stop = text.rindex("<11>User")
    assert positions == covering(spelled, text, [(start, stop)])


def test_a_header_of_no_characters_is_empty_within_a_token_too() -> None:
    codec = codec_of("", "{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [HI | {"content": "towe"}, HELLO | {"content": "r"}]
    fields = {"add_generation_prompt": False}
    assert found(codec, asked(messages, {"turn": 1}, **fields))[2][-1] == b"er"
    with refuses("header of message 1 is empty: it has no token"):
        found(codec, asked(messages, {"turn": 1, "part": "header"}, **fields))


def test_an_image_belongs_to_the_content_that_it_stands_in() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
        "{{ p.text if p.type == 'text' else 'IMG' }}{% endfor %}{% endfor %}"
    )
    codec = codec_of("", template, parts=True)
    image = codec.encode_here(["IMG"], False)[0].ids.tolist()
    words = {"type": "text", "text": "What?"}
    for content, wanted in (
        ([picture(URL), words], "IMGWhat?"),
        ([words, picture(URL)], "What?IMG"),
        ([picture(URL)], "IMG"),
    ):
        parsed = asked([HI, HI | {"content": content}, HI], {"turn": 1})
        text, positions, spelled = found(codec, parsed, images=2, image_placeholder=image)
        start = text.index(wanted)
        assert positions == covering(spelled, text, [(start, start + len(wanted))])


def test_answers_of_tools_are_no_parts() -> None:
    template = "{% for m in messages %}{{ m.content if m.content is string else 'P' }}{% endfor %}"
    text, positions, spelled = found(
        codec_of("", template, parts=True), asked(ANSWERED, {"role": "tool"})
    )
    assert text == "PP12 C"
    assert positions == covering(spelled, text, [(2, 6)])


def test_prompts_without_messages_have_no_turns() -> None:
    for prompts in (["Hi"], [[1, 2]]):
        parsed = parse_job(
            JobRequest(model="m", prompts=prompts, capture=CaptureSpec(positions=Span(turn=0)))
        )
        with refuses("need a prompt given as `messages`", field="capture.positions"):
            found(codec_of("phi3"), parsed)
    with refuses("a turn is not valid here", field="steering"):
        _check_global_positions(Span(turn=0), "steering")


@pytest.mark.parametrize("template", sorted(TOKENS.keys() - {"hermes3"}))  # it needs tools
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_tokens_of_a_turn_cover_its_content_exactly(template: str, data: st.DataObject) -> None:
    letters = st.text("ab \n<>|é京🙂\ue000", max_size=6)
    roles = ["user", "assistant"] * data.draw(st.integers(1, 3))
    if template not in ("gemma2", "mistral-v3"):
        roles = ["system"] * data.draw(st.integers(0, 1)) + roles
    opened = data.draw(st.booleans())
    spaces = st.text(" \n\t", max_size=2)
    messages = [
        {
            "role": role,
            "content": f"{data.draw(spaces)}«{data.draw(letters)}{n}»{data.draw(spaces)}",
        }
        for n, role in enumerate(roles[: -1 if opened else None])
    ]
    number = data.draw(st.integers(0, len(messages) - 1))
    fields = {"add_generation_prompt": opened, "continue_final_message": not opened}
    parsed = asked(messages, {"turn": number}, **fields)
    text, positions, spelled = found(codec_of(template), parsed)
    stripped = [message for message in messages if message["role"] in TRIMMED.get(template, ())]
    content = messages[number]["content"]
    if any(message["content"] != message["content"].strip() for message in stripped) or (
        template == "qwen3" and not opened and messages[-1]["content"].startswith("\n")
    ):
        content = content.strip()
    start = text.index(content.strip()) - (len(content) - len(content.lstrip()))
    assert text.count(content.strip()) == 1
    assert positions == covering(spelled, text, [(start, start + len(content))])


class Sliced(str):
    """A text that counts the characters of its slices."""

    characters = 0

    def __getitem__(self, part: Any) -> str:
        result = super().__getitem__(part)
        Sliced.characters += len(result)
        return result

    def __iter__(self) -> Any:
        raise AssertionError("compared by character")


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_texts_are_compared_by_slices_that_add_up_to_their_length(first: str, second: str) -> None:
    Sliced.characters = 0
    same = shared_length(Sliced(first), Sliced(second))
    alike = [one == other for one, other in zip(first, second, strict=False)]
    assert same == [*alike, False].index(False)
    assert Sliced.characters <= 2 * (len(alike) + 7)


def test_many_conversations_cost_more_than_one_of_as_many_messages() -> None:
    body = {"model": "m", "messages": [[HI]] * 100, "capture": {"positions": [{"role": "user"}]}}
    many = parse_job(from_json(to_json(body), JobRequest))
    one = asked([HI] * 100, {"role": "user"})
    assert check_cost(many, 100, 1000) > check_cost(one, 1, 1000) + 99 * RENDER_COST


def test_turns_of_long_conversations_are_bounded() -> None:
    parsed = asked([HI, HELLO] * 200, {"role": "user"})
    assert check_cost(parsed, 1, 2000) < check_cost(asked([HI, HELLO] * 400, {"turn": 0}), 1, 2000)
    with refuses("selects too many positions", field="capture.positions"):
        check_cost(asked([HI, HELLO] * 200, {"part": "all"}), 1, 2000)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"turn": 0, "text": "a"}, "give one of text, turn"),
        ({"turn": 0, "image": 0}, "give one of image, turn"),
        ({"role": "user", "start": 1}, "turn takes neither"),
        ({"part": "all", "occurrence": 1}, "turn takes neither"),
        ({"part": "tools", "turn": 0}, "omit turn and role"),
        ({"role": "model"}, "Invalid enum value 'model'"),
    ],
)
def test_a_turn_stands_alone_in_its_span(span: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        from_json(to_json(span), Span)
