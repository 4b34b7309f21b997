"""Flags of `vllm serve`: the same as vLLM's own, each with one meaning."""

import argparse
import re
from typing import Any

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from midstream.schemas.settings.settings import SettingsError, known_settings, load_settings
from midstream_ops.serve_flags import (
    ALSO,
    COMMON,
    NO_EFFECT,
    REFUSED,
    SETTINGS,
    SPELLINGS,
    arguments,
    check_quickly,
    flag,
    is_switch,
    options_of_vllm,
    translated,
)

#: Fields of vLLM's arguments that its command line does not have.
NO_FLAGS = {"enable_mm_processor_stats", "mamba_config", "model_weights"}


@pytest.fixture(scope="module")
def of_vllm() -> dict[str, argparse.Action]:
    actions = make_arg_parser(FlexibleArgumentParser())._actions
    return {action.dest: action for action in actions if action.dest not in ("help", "model_tag")}


def test_every_flag_of_vllm_serve_is_known(of_vllm: dict[str, argparse.Action]) -> None:
    assert set(arguments()) - NO_FLAGS == set(of_vllm)


def test_every_spelling_of_vllm_serve_is_taken(of_vllm: dict[str, argparse.Action]) -> None:
    others = {
        name: [text for text in action.option_strings if text not in _own(name)]
        for name, action in of_vllm.items()
    }
    assert {name: texts for name, texts in others.items() if texts} == {
        name: [text] for name, text in SPELLINGS.items()
    }


def _own(name: str) -> tuple[str, str]:
    return flag(name), f"--no-{flag(name)[2:]}"


def test_switches_are_those_of_vllm_serve(of_vllm: dict[str, argparse.Action]) -> None:
    known = {name for name, action in of_vllm.items() if action.nargs == 0}
    assert {name for name in arguments() if is_switch(name)} - NO_FLAGS == known


def test_every_flag_has_one_meaning() -> None:
    meanings: dict[str, Any] = {
        "setting": SETTINGS,
        "no effect": NO_EFFECT,
        "refused": REFUSED,
    }
    found = {
        name: [kind for kind, names in meanings.items() if name in names] for name in arguments()
    }
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
    assert {name for name, kinds in found.items() if not kinds} <= set(options_of_vllm())
    assert set(COMMON) <= set(arguments()) - set(REFUSED)
    known = known_settings().keys()
    assert {*SETTINGS.values(), *(name for more in ALSO.values() for name in more)} <= known
    told = {name for text in REFUSED.values() for name in re.findall(r"--set ([\w.]+)=", text)}
    assert told <= known


def test_flags_become_settings_and_engine_options() -> None:
    given: dict[str, str | bool] = {
        "host": "0.0.0.0",
        "port": "8000",
        "served_model_name": "m",
        "max_model_len": "16k",
        "max_num_batched_tokens": "8K",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True,
        "seed": "7",
        "hf_overrides": '{"rope_theta": 1.0}',
        "trust_remote_code": True,
        "revision": "main",
    }
    made = load_settings({}, **translated(given))
    assert made.api_host == "0.0.0.0"
    assert made.api_port == 8000
    assert made.model_name == "m"
    assert made.vllm.max_model_len == 16_000
    assert made.vllm.max_num_batched_tokens == 8_192
    assert made.vllm.enforce_eager is True
    assert not made.vllm.enable_prefix_caching
    assert made.tool_parser == "hermes"
    assert made.engine_options == {
        "seed": 7,
        "hf_overrides": {"rope_theta": 1.0},
        "trust_remote_code": True,
        "revision": "main",
    }


def test_a_key_makes_the_api_require_keys() -> None:
    key = f"ms_{'a' * 12}_{'b' * 32}"
    assert translated({"api_key": key}) == {"admin_key": key, "auth": "keys"}


def test_refused_flags_say_why_all_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        translated({"enable_dbo": True, "ssl_keyfile": "k", "lora_modules": "a=b", "port": "http"})
    assert str(refused.value) == (
        "--enable-dbo: it divides a batch's rows between passes or ranks, and edits would reach "
        "the wrong rows; --ssl-keyfile: TLS ends at a proxy in front of the API; "
        "--lora-modules: adapters are registered while the server runs: `--max-loras NUMBER`, "
        "then `midstream put lora`; --port 'http': Expected `int`, got `str`"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtpye": "float32"}, "[engine] dtpye: not an option of vLLM; did you mean 'dtype'?"),
        ({"seed": "three"}, "[engine] seed: 'three' is no int"),
        ({"swap_space": "x", "seed": 1.5}, "[engine] seed: 1.5 is no int"),
        ({"enforce_eager": "yes"}, "[engine] enforce_eager: 'yes' is no bool"),
    ],
)
def test_a_wrong_option_is_refused_without_an_import_of_vllm(
    options: dict[str, object], told: str
) -> None:
    if not options_of_vllm():
        pytest.skip("vLLM is not installed")
    check_quickly({"seed": 1, "max_model_len": 512})
    with pytest.raises(SettingsError, match=re.escape(told)):
        check_quickly(options)
