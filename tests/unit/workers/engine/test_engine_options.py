"""vLLM's options: found by name and type, refused with a reason or passed, merged from all sources,
and stamped where they are unproven.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from extension_kit import install
from option_cases import CASES, Case
from refusal_kit import refuses
from tiny import checkpoint
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from midstream.schemas.base import machine
from midstream.schemas.base.ring import Ring, plan_queue
from midstream.schemas.settings.settings import (
    FILE_VARIABLE,
    Settings,
    SettingsError,
    engine_options,
    known_settings,
    load_settings,
    to_environment,
)
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.options import engine_arguments as vllm_options, option_lists
from midstream.workers.engine.options.option_check import accepted
from midstream.workers.engine.options.option_lists import (
    OURS,
    PROVEN,
    WRONG,
)
from midstream.workers.engine.vllm import _queue_mib, require_proven
from midstream.workers.engines import check_options, make_engine
from midstream.workers.runner.support.denylist import check

#: Proven on two machines, by `tests/machines/test_nodes.py`.
MACHINES = {"master_addr", "master_port", "nnodes", "node_rank"}


def options(**given: Any) -> Settings:
    return Settings(model="/models/x", engine_options=given)


def test_every_listed_option_is_one_of_vllm_and_in_one_list() -> None:
    listed = [*OURS, *WRONG, *PROVEN]
    assert len(set(listed)) == len(listed)
    assert set(listed) - {field.name for field in fields(AsyncEngineArgs)} == set()


def test_every_proven_option_and_value_has_a_case_on_the_engine() -> None:
    tried: dict[str, list[Any]] = {}
    for case in CASES:
        tried.setdefault(case.option, []).append(case.value)
    assert set(tried) == set(PROVEN) - MACHINES
    for name in tried:
        values = PROVEN[name]
        parts = [part for value in tried[name] if isinstance(value, dict) for part in value]
        assert [value for value in values if value not in [*tried[name], *parts]] == [], name


def test_our_setting_for_an_option_exists() -> None:
    assert {setting.split()[0] for setting in OURS.values()} <= known_settings().keys()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: checkpoint(name, folder / name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_proven_option_leads_to_a_refused_configuration(
    case: Case, checkpoints: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    # vLLM inspects each further architecture in a process of its own.
    path = checkpoints("gemma3" if case.name == "gemma3" else "llama")
    given = {
        "engine.max_model_len": 128,
        "engine.max_num_batched_tokens": 512,
        "engine.tensor_parallel_size": case.ranks,
    } | case.settings
    served = case.served(tmp_path, path) if case.served and not case.on_hub else path
    options = {"engine_options": case.options(tmp_path, path)}
    settings = load_settings({}, model=str(served), **options, **given)
    made: VllmConfig = AsyncEngineArgs(
        **vllm_options.engine_options(settings),
        worker_cls="midstream.workers.runner.vllm.worker_class.MidstreamWorker",
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    made.scheduler_config.scheduler_cls = vllm_options.scheduler_class(made)
    check(made)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "gpu_memory_utilisation",
            0.5,
            r"not an option of vLLM .*; did you mean 'gpu_memory_utilization'\?",
        ),
        ("no_such_thing_at_all", 1, "docs/reference/options.md lists all"),
        ("seed", "seven", "valid integer"),
        ("seed", True, "valid integer"),
        ("seed", 1.5, "valid integer"),
        ("gpu_memory_utilization", "0.5", "valid number"),
        ("trust_remote_code", 1, "valid boolean"),
        ("revision", 123, "valid string: write '\"123\"'"),
        ("kv_cache_dtype", "fp9", "Input should be 'auto'"),
        ("attention_backend", "CPU_ATN", r"did you mean 'CPU_ATTN'\?"),
        ("compilation_config", {"modde": 0}, r"modde: no such field; did you mean 'mode'\?"),
        ("served_model_name", "m", "use the setting model_name"),
        ("distributed_executor_backend", "ray", "use the setting executor"),
        ("enable_dbo", True, "divides a batch's rows"),
        ("scheduler_cls", "a.B", "Midstream's own class"),
    ],
)
def test_what_is_refused_is_named_with_what_is_valid(name: str, value: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        accepted(options(**{name: value}))
    assert str(caught.value).startswith(f"[engine] {name}: ")


@pytest.mark.parametrize(
    ("name", "value", "caveat"),
    [
        ("moe_backend", "triton", 'moe_backend="triton"'),
        ("load_format", "dummy", 'load_format="dummy", proven: "auto", "hf", "safetensors"'),
        ("compilation_config", {"pass_config": {}}, 'compilation_config={"pass_config": {}}, prov'),
        ("compilation_config", {"backend": "eager"}, ""),
    ],
)
def test_an_unproven_option_passes_with_a_caveat_that_names_it(
    name: str, value: Any, caveat: str
) -> None:
    found = accepted(options(**{"seed": 3, name: value}))
    assert found.options["seed"] == 3
    assert set(found.options) == {"seed", name}
    assert len(found.caveats) == bool(caveat)
    for text in found.caveats:
        assert text.startswith(f"unproven: the engine option {caveat}")


def test_what_is_unproven_is_refused_if_the_settings_require_proof() -> None:
    caveats = ["unproven: vLLM 9", "the quantised layers round their input"]
    require_proven(Settings(), caveats)
    require_proven(Settings(compare="require"), caveats[1:])
    with refuses("compare=require refuses what is unproven: vLLM 9", kind="engine_failed"):
        require_proven(Settings(compare="require"), caveats)


def test_values_reach_vllm_with_its_own_types() -> None:
    found = accepted(options(attention_backend="cpu_attn", gpu_memory_utilization=1))
    assert found.caveats == []
    assert found.options["attention_backend"].name == "CPU_ATTN"
    assert isinstance(found.options["gpu_memory_utilization"], float)


def test_the_fake_engine_takes_no_options_of_vllm() -> None:
    with refuses("unknown field `seed`", kind="engine_failed"):
        make_engine(Settings(engine="fake", engine_options={"seed": 1}))


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda: accepted(options(sead=1, enable_dbo=True)),
            r"\[engine\] sead: .*; \[engine\] enable_dbo: ",
        ),
        *(
            (lambda settings=settings: check_options(Settings(**settings)), said)
            for settings, said in (
                ({"hooks": "post_blok"}, "hooks: 'post_blok' is not a hook point"),
                ({"extensions": "nothing-of-it"}, "nothing-of-it"),
                ({"tool_parser": "hermes2"}, "tool_parser='hermes2': vLLM has no such parser"),
                ({"engine": "fak"}, "engine='fak': unknown engine; valid: vllm, fake, gradients"),
            )
        ),
        *(
            (
                lambda text=text: load_settings({"MIDSTREAM_ENGINE_OPTIONS": text}),
                "MIDSTREAM_ENGINE_OPTIONS",
            )
            for text in ("{", "[1]", "7", '"seed"')
        ),
        (
            lambda: load_settings({}, engine_options={"hf_overrides": {"x": "y" * 70_000}}),
            "64 KiB",
        ),
        *((lambda text=text: engine_options([text]), "NAME=VALUE") for text in ("seed", "=1", "")),
    ],
)
def test_wrong_options_and_settings_are_refused_before_the_engine_starts(
    use: Callable[[], object], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        use()


def test_an_engine_that_two_packages_offer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other", "1", {}, "[midstream.engines]\nfake = other:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="several packages offer this engine"):
        check_options(Settings(engine="fake"))


# Where options come from


def test_the_file_has_a_table_and_other_sources_override_it_option_by_option(
    tmp_path: Path,
) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text(
        'model = "m"\n[engine]\nseed = 1\nrevision = "a"\n[engine.hf_overrides]\nrope_theta = 5.0\n'
    )
    env = {FILE_VARIABLE: str(file), "MIDSTREAM_ENGINE_OPTIONS": '{"seed": 2, "watermark": 0.5}'}
    settings = load_settings(env, engine_options=engine_options(["watermark=0.1"]))
    assert settings.engine == "vllm"
    assert settings.engine_options == {
        "seed": 2,
        "revision": "a",
        "hf_overrides": {"rope_theta": 5.0},
        "watermark": 0.1,
    }
    assert load_settings(to_environment(settings)) == settings


def test_options_that_midstream_reads_are_typed_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text("[engine]\nseed = 1\nmax_num_seqs = 1\nblock_size = 16\nmax_model_len = 1\n")
    env = {
        FILE_VARIABLE: str(file),
        "MIDSTREAM_ENGINE_MAX_NUM_SEQS": "2",
        "MIDSTREAM_ENGINE_OPTIONS": '{"block_size": 32}',
    }
    settings = load_settings(
        env,
        {"engine.max_model_len": "64", "engine.stream_interval": "3"},
        engine_options=engine_options(["dtype=float32"]),
    )
    assert settings.vllm == VllmOptions(
        max_num_seqs=2, block_size=32, max_model_len=64, dtype="float32"
    )
    assert settings.engine_options == {"seed": 1, "stream_interval": 3}
    assert load_settings(to_environment(settings)) == settings


@pytest.mark.parametrize(
    ("env", "given", "said"),
    [
        (
            {"MIDSTREAM_ENGINE_OPTIONS": '{"max_num_seqs": "3"}'},
            {},
            r"^engine\.max_num_seqs='3' \(MIDSTREAM_ENGINE_OPTIONS\): Expected `int`, got `str`$",
        ),
        ({"MIDSTREAM_ENGINE_OPTIONS": "3"}, {}, r"^MIDSTREAM_ENGINE_OPTIONS=.*Expected `object`"),
        ({"MIDSTREAM_ENGINE_MAX_NUM_SEQS": "x"}, {}, r"^MIDSTREAM_ENGINE_MAX_NUM_SEQS='x' \(env"),
        ({}, {"engine.dtype": "int8"}, r"^--set engine\.dtype='int8': Invalid enum value 'int8'"),
        ({}, {"dtype": "float32"}, r"^--set dtype: unknown setting; did you mean 'engine\.dtype'"),
    ],
)
def test_a_wrong_option_that_midstream_reads_is_named_with_its_source(
    env: dict[str, str], given: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(env, given)


def test_text_under_engine_still_names_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('engine = "fake"\n')
    assert load_settings({FILE_VARIABLE: str(file)}).engine == "fake"


def test_the_command_line_reads_json_where_it_is_json() -> None:
    given = [
        "seed=7",
        "trust-remote-code=true",
        "revision=v1.2",
        'hf_overrides={"a": [1]}',
        "download_dir=",
        "tokenizer=a=b",
    ]
    assert engine_options(given) == {
        "seed": 7,
        "trust_remote_code": True,
        "revision": "v1.2",
        "hf_overrides": {"a": [1]},
        "download_dir": "",
        "tokenizer": "a=b",
    }


def test_no_option_is_refused_for_two_reasons() -> None:
    assert len(WRONG) == sum(map(len, option_lists._REFUSED.values()))


def test_the_queue_is_a_share_of_the_containers_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(rows=65536, size=1 << 30)
    memory = 12 << 30
    limit = tmp_path / "memory.max"
    limit.write_text(f"{memory}\n")
    monkeypatch.setattr(machine, "_LIMITS", (limit,))
    found = _queue_mib(Settings(), ring) << 20
    assert found == plan_queue(ring, host_bytes=memory) < plan_queue(ring)
