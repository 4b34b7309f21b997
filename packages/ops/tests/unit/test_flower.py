"""Flower's options: when it needs a password, and what it keeps."""

from typing import Any

import pytest

from midstream.schemas.settings.settings import Settings, SettingsError
from midstream_ops import flower


@pytest.mark.parametrize(
    "asked", [{"flower_host": "0.0.0.0"}, {"auth": "keys"}, {"api_host": "0.0.0.0"}]
)
def test_flower_needs_a_password_off_loopback_and_where_the_api_asks_for_keys(
    asked: dict[str, Any],
) -> None:
    with pytest.raises(SettingsError, match="MIDSTREAM_FLOWER_AUTH"):
        flower.options(Settings(**asked))
    assert flower.options(Settings(flower_auth="u:p", **asked))["FLOWER_BASIC_AUTH"] == "u:p"
    assert "FLOWER_BASIC_AUTH" not in flower.options(Settings(flower_host="127.0.0.1"))


@pytest.mark.parametrize(
    "pairs", ["secret", ":", "user:", ":secret", "user:secret,:", "user:secret,"]
)
def test_a_password_of_flower_without_a_user_or_the_other_way_round_is_refused(pairs: str) -> None:
    with pytest.raises(SettingsError, match="user:password"):
        flower.options(Settings(flower_auth=pairs))


def test_flower_remembers_changes_nothing_and_keeps_a_bounded_number() -> None:
    from flower.options import options

    found = flower.options(Settings(data_dir="/somewhere"))
    names = {name.removeprefix("FLOWER_").lower() for name in found}
    assert names <= set(options), "this Flower would ignore it"
    assert found["FLOWER_PERSISTENT"] == "true"
    assert found["FLOWER_READ_ONLY"] == "true"
    assert found["FLOWER_DB"] == "/somewhere/flower.db"
    for name in ("FLOWER_MAX_TASKS", "FLOWER_MAX_WORKERS"):
        assert 0 < int(found[name]) <= 5000
