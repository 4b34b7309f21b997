"""Are settings checked once at start, whatever they come from, and is a wrong one named?"""

from pathlib import Path
from typing import Any

import pytest

from midstream.schemas.settings.settings import (
    FILE_VARIABLE,
    Settings,
    SettingsError,
    load_settings,
    to_environment,
)
from midstream.schemas.settings.vllm_options import VllmOptions


def test_defaults_without_settings() -> None:
    assert load_settings({}) == Settings()


# field case 22
@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("0", False), ("true", True), ("1", True)]
)
def test_a_boolean_in_the_environment_means_what_it_says(text: str, value: bool) -> None:
    assert (
        load_settings({"MIDSTREAM_ENGINE_ENABLE_PREFIX_CACHING": text}).vllm.enable_prefix_caching
        is value
    )


# field case 22
def test_text_that_is_no_boolean_is_refused_and_not_taken_for_true(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MIDSTREAM_ENGINE_ENABLE_PREFIX_CACHING"):
        load_settings({"MIDSTREAM_ENGINE_ENABLE_PREFIX_CACHING": "off please"})
    file = tmp_path / "midstream.toml"
    file.write_text('[engine]\nenable_prefix_caching = "false"\n')
    with pytest.raises(SettingsError, match=r"engine\.enable_prefix_caching"):
        load_settings({FILE_VARIABLE: str(file)})


def test_arguments_win_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('api_port = 1\nflower_port = 1\nmodel = "a"\n')
    settings = load_settings(
        {FILE_VARIABLE: str(file), "MIDSTREAM_API_PORT": "2", "MIDSTREAM_FLOWER_PORT": "2"},
        api_port=3,
    )
    assert settings.api_port == 3
    assert settings.flower_port == 2
    assert settings.model == "a"


@pytest.mark.parametrize(
    ("environment", "given", "why"),
    [
        *(
            ({f"MIDSTREAM_{name}": text}, {}, f"MIDSTREAM_{name}")
            for name, text in (
                ("API_PORT", "70000"),
                ("ENGINE_MAX_NUM_SEQS", "0"),
                ("LEASE_S", "-1"),
                ("ENGINE_DTYPE", "int8"),
                ("KV_CACHE_GIB", "much"),
                ("NO_SUCH", "1"),
            )
        ),
        ({"MIDSTREAM_AUTH": "key"}, {}, "'key'; valid: auto, keys, open$"),
        ({"MIDSTREAM_WEBHOOK_ALLOW_PRIVATE": "yes"}, {}, "`str`; valid: true, false$"),
        ({"MIDSTREAM_KV_CACHE_GIB": "2GB"}, {}, "`str`: a number of GiB$"),
        ({"MIDSTREAM_CAPTURE_QUOTA_MIB": "10GB"}, {}, "`str`: a number of MiB$"),
        ({"MIDSTREAM_RESULT_TTL_S": "7d"}, {}, "`str`: a number of seconds$"),
        ({}, {"limit": {"jobs_in_flight": 3}}, "did you mean 'limits'"),
        ({}, {"redis_url": "localhost:6379"}, "redis_url: not a URL of Redis, such as redis://"),
        ({FILE_VARIABLE: "/nowhere/gone.toml"}, {}, r"gone\.toml"),
        ({}, {"artifact_store": "gs://bucket"}, "valid: s3://bucket/prefix"),
        ({}, {"artifact_store": "s3://key:secret@bucket"}, "valid: s3://bucket/prefix"),
        ({}, {"artifact_store": "s3://kept/here?endpoint=minio:9000"}, "valid: http://host:port"),
        ({}, {"artifact_store": "s3://kept/here?zone=a"}, "valid: s3://bucket/prefix"),
        ({}, {"artifact_store": "s3://kept/here?endpoint"}, "valid: s3://bucket/prefix"),
        ({}, {"artifact_public_endpoint": "http://user:secret@minio"}, "valid: http://host:port"),
        ({}, {"artifact_secret_key": "alone"}, "belong together"),
    ],
)
def test_wrong_settings_are_refused_with_where_they_are_and_what_is_valid(
    environment: dict[str, str], given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        load_settings(environment, **given)


def test_a_child_process_reads_back_the_same_settings() -> None:
    settings = Settings(
        model="/models/x",
        vllm=VllmOptions(enable_prefix_caching=False, max_model_len=512),
        lease_s=2.5,
        runner="v2",
        log_level="DEBUG",
    )
    assert load_settings(to_environment(settings)) == settings


def test_the_uri_of_the_artifact_store_has_endpoint_and_region_and_no_credentials() -> None:
    uri = "s3://kept/here?endpoint=http://minio:9000&region=eu-west-1"
    keys = {"artifact_access_key": "AKID", "artifact_secret_key": "hidden"}
    assert load_settings({}, artifact_store=uri, **keys).artifacts == uri
    assert Settings(data_dir="/data").artifacts == "/data/captures"
    assert Settings(artifact_store="/shared/captures").artifacts == "/shared/captures"
