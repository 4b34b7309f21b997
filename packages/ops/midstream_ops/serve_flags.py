"""Flags of `vllm serve`: what each becomes in Midstream. `midstream serve` reads these tables.

A flag has the name of vLLM's argument, with dashes. One that is in no table is an option of the
engine if the installed vLLM's source has it, and passes `option_check` like those of `--engine`.
Imports no vLLM, which would take seconds.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from midstream.schemas.base.errors import suggestion
from midstream.schemas.base.records import json_or_text
from midstream.schemas.settings.settings import SettingsError, known_settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.options.option_lists import OURS, WRONG
from midstream.workers.runner.support.vllm_source import installed

#: Argument → the setting that takes its value.
SETTINGS: dict[str, str] = {
    "host": "api_host",
    "port": "api_port",
    "api_key": "admin_key",
    "served_model_name": "model_name",
    "tool_call_parser": "tool_parser",
    "distributed_executor_backend": "executor",
    "otlp_traces_endpoint": "otel_endpoint",
    "spec_method": "drafter",
    "spec_model": "draft_model",
    "spec_tokens": "speculative_tokens",
    **{name: f"engine.{name}" for name in VllmOptions.__struct_fields__},
}
#: Argument → the settings that it changes besides.
ALSO: dict[str, dict[str, str]] = {"api_key": {"auth": "keys"}}
#: Argument → why it is accepted and changes nothing.
NO_EFFECT: dict[str, str] = {
    "enable_auto_tool_choice": "`tool_choice` is `auto` wherever the parser is known"
}
#: Why arguments that are no engine options are refused → the arguments.
_REFUSED: dict[str, tuple[str, ...]] = {
    "the model is the first argument: `midstream serve MODEL`": ("model",),
    "use `--set log_level=…`": ("uvicorn_log_level",),
    "settings are read from the TOML file that MIDSTREAM_CONFIG names": ("config",),
    "chats are rendered with the checkpoint's own template; send `chat_template_kwargs` with a "
    "request": (
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "trust_request_chat_template",
        "trust_request_mm_kwargs",
    ),
    "adapters are registered while the server runs: `--max-loras NUMBER`, then "
    "`midstream put lora`": ("lora_modules",),
    "the parsers are vLLM's own: `--tool-call-parser`": ("tool_parser_plugin",),
    "TLS ends at a proxy in front of the API": (
        "enable_ssl_refresh",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_ciphers",
        "ssl_keyfile",
    ),
    "behind a proxy, use `--set public_url=URL`": ("root_path",),
    "start one worker for each engine instead": (
        "api_server_count",
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_failure_threshold",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
    ),
    "the other machines run `python -m midstream.workers`": ("headless", "node_rank"),
    "it belongs to vLLM's own HTTP server, which does not run here": (
        "allow_credentials",
        "allowed_headers",
        "allowed_methods",
        "allowed_origins",
        "anthropic_disabled_thinking_effort",
        "cohere_format",
        "cohere_is_reasoning_model",
        "disable_access_log_for_endpoints",
        "disable_fastapi_docs",
        "disable_uvicorn_access_log",
        "enable_flash_late_interaction",
        "enable_force_include_usage",
        "enable_log_deltas",
        "enable_log_outputs",
        "enable_offline_docs",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "enable_request_id_headers",
        "enable_scale_out",
        "enable_server_load_tracking",
        "enable_tokenizer_info_endpoint",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "grpc",
        "grpc_port",
        "h11_max_header_count",
        "h11_max_incomplete_event_size",
        "log_error_stack",
        "max_log_len",
        "middleware",
        "response_role",
        "return_tokens_as_token_ids",
        "sse_keep_alive_interval",
        "tool_server",
        "tool_strict_level",
        "uds",
    ),
}
#: Argument → why it is refused.
REFUSED: dict[str, str] = (
    WRONG
    | {
        name: f"use `--set {setting.partition(' ')[0]}=…`"
        for name, setting in OURS.items()
        if name not in SETTINGS
    }
    | {name: reason for reason, names in _REFUSED.items() for name in names}
)
#: The flags that `midstream serve --help` lists.
COMMON: tuple[str, ...] = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "quantization",
    "load_format",
    "revision",
    "tokenizer",
    "trust_remote_code",
    "seed",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "max_loras",
    "max_lora_rank",
)
#: Argument → its other spellings.
SPELLINGS: dict[str, str] = {
    "api_server_count": "-asc",
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_address": "-dpa",
    "data_parallel_backend": "-dpb",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_multi_port_external_lb": "-dpm",
    "data_parallel_rank": "-dpn",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_start_rank": "-dpr",
    "decode_context_parallel_size": "-dcp",
    "diffusion_config": "-dc",
    "enable_expert_parallel": "-ep",
    "gpu_memory_utilization": "--device-memory-utilization",
    "nnodes": "-n",
    "node_rank": "-r",
    "pipeline_parallel_size": "-pp",
    "prefill_context_parallel_size": "-pcp",
    "quantization": "-q",
    "speculative_config": "-sc",
    "tensor_parallel_size": "-tp",
}
#: Switches whose names do not begin with `enable_` or `disable_`: `--NAME` or `--no-NAME`, without
#: a value. Those of vLLM's own server, and two that `--help` lists also without vLLM.
_SWITCHES = frozenset(
    (
        "allow_credentials",
        "cohere_is_reasoning_model",
        "enforce_eager",
        "exclude_tools_when_tool_choice_none",
        "grpc",
        "headless",
        "log_error_stack",
        "return_tokens_as_token_ids",
        "trust_remote_code",
        "trust_request_chat_template",
        "trust_request_mm_kwargs",
    )
)
#: Arguments with `able_` that take a value.
_NO_SWITCHES = frozenset(("disable_access_log_for_endpoints",))

#: Types of switches; and plain types → the values that they take.
_SWITCHED = ("bool", "bool | None")
_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "bool": (bool,),
    "bool | None": (bool, type(None)),
}

#: Settings that count tokens: vLLM reads `16k` as 16,000 and `16K` as 16,384.
_TOKENS = frozenset(("max_model_len", "max_num_batched_tokens", "max_num_scheduled_tokens"))
_SUFFIXED = re.compile(r"(\d{1,9})([kKmM])")
_TIMES = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20}


def flag(name: str) -> str:
    """Return the flag of an argument: `--max-model-len`."""
    return f"--{name.replace('_', '-')}"


@cache
def _annotations(name: str) -> dict[str, str]:
    """Return the fields of a class of the installed vLLM's arguments, with their types as in its
    source; empty without vLLM.
    """
    try:
        arguments = installed().find("vllm.engine.arg_utils", name)
    except ModuleNotFoundError:
        return {}
    assert arguments is not None
    assert isinstance(arguments[1], ast.ClassDef)
    return {
        field.target.id: ast.unparse(field.annotation)
        for field in arguments[1].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


@cache
def options_of_vllm() -> dict[str, bool]:
    """Return the installed vLLM's engine options, and whether each takes no value; empty without
    vLLM.
    """
    return {name: kind in _SWITCHED for name, kind in _annotations("EngineArgs").items()}


def check_quickly(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for engine options that the installed vLLM does not have, and for values
    of plain types that are of another. The import of vLLM, with which `option_check` checks all
    options, takes seconds, and minutes on a busy machine.
    """
    types = _annotations("EngineArgs") | _annotations("AsyncEngineArgs")
    known = [name for name in types if name not in WRONG]
    wrong = []
    for name, value in options.items():
        if not types or name in OURS or name in WRONG:
            continue
        if name not in types:
            hint = suggestion(name, [*known, *OURS]) or "docs/vllm.md lists all"
            wrong.append(f"[engine] {name}: not an option of vLLM; {hint}")
        elif (kinds := _PLAIN.get(types[name])) and type(value) not in kinds:
            wrong.append(f"[engine] {name}: {value!r} is no {types[name].partition(' ')[0]}")
    if wrong:
        raise SettingsError("; ".join(wrong))


@cache
def arguments() -> list[str]:
    """Return every known argument of `vllm serve`, in the order of their names."""
    names = {*SETTINGS, *NO_EFFECT, *REFUSED, *options_of_vllm()}
    return sorted(name for name in names if not name.startswith("_"))


def is_switch(name: str) -> bool:
    """Return whether an argument takes no value."""
    named = name.startswith(("enable_", "disable_")) and name not in _NO_SWITCHES
    return named or name in _SWITCHES or options_of_vllm().get(name, False)


def translated(given: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return the settings that flags of `vllm serve` stand for, by name.

    Raises SettingsError that names every refused flag, with the reason, and every invalid value.
    """
    wrong = [f"{flag(name)}: {REFUSED[name]}" for name in given if name in REFUSED]
    settings: dict[str, Any] = {}
    types = known_settings()
    for name, value in given.items():
        if isinstance(value, str) and name in _TOKENS and (number := _SUFFIXED.fullmatch(value)):
            value = str(int(number[1]) * _TIMES[number[2]])
        if setting := SETTINGS.get(name):
            try:
                settings[setting] = msgspec.convert(value, types[setting], strict=False)
            except msgspec.ValidationError as error:
                wrong.append(f"{flag(name)} {value!r}: {error}")
            settings |= ALSO.get(name, {})
        elif name not in REFUSED and name not in NO_EFFECT:
            settings[f"engine.{name}"] = value if isinstance(value, bool) else json_or_text(value)
    if wrong:
        raise SettingsError("; ".join(wrong))
    return settings
