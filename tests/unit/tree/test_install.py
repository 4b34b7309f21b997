"""Secrets and modes of a data directory: created once, closed to other accounts, and not created
where the settings name others.
"""

import stat
from pathlib import Path

import pytest

from midstream.broker.processes.install import (
    close_folder,
    keep_redis_url,
    kept_redis_url,
    redis_password,
    with_secrets,
)
from midstream.broker.receipts.curve import client_keys, server_keys, with_kept_keys
from midstream.schemas.settings.settings import Settings, SettingsError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("before", "after", "umask"),
    [(None, 0o700, 0o077), (0o755, 0o700, 0o077), (0o750, 0o750, 0o027), (0o700, 0o700, 0o077)],
)
def test_a_data_directory_is_closed_but_to_a_group_that_was_let_in(
    tmp_path: Path, before: int | None, after: int, umask: int
) -> None:
    data = tmp_path / "data"
    said = list[str]()
    if before is not None:
        data.mkdir()
        data.chmod(before)
    assert close_folder(data, said.append) == umask
    assert mode(data) == after
    assert len(said) == (before == 0o755)


def test_a_world_writable_data_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(SettingsError, match=r"data_dir=.* shared by all accounts"):
        close_folder(tmp_path, print)
    assert mode(tmp_path) == 0o1777


def test_secrets_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    first = redis_password(tmp_path)
    assert len(first) >= 32
    assert redis_password(tmp_path) == first
    assert mode(tmp_path / "secrets") == 0o700
    assert mode(tmp_path / "secrets" / "redis.password") == 0o600
    assert kept_redis_url(tmp_path) == ""
    for port in (7, 8):
        keep_redis_url(f"redis://:{first}@127.0.0.1:{port}/0", tmp_path)
        assert kept_redis_url(tmp_path) == f"redis://:{first}@127.0.0.1:{port}/0"
    assert mode(tmp_path / "secrets" / "redis.url") == 0o600
    # a crash of the file system left it empty
    (tmp_path / "secrets" / "redis.password").write_text("")
    assert redis_password(tmp_path) != ""


def test_flower_gets_a_password_where_callers_need_keys(tmp_path: Path) -> None:
    said: list[str] = []
    assert with_secrets(Settings(), tmp_path, said.append).flower_auth == ""
    made = with_secrets(Settings(auth="keys"), tmp_path, said.append).flower_auth
    assert made.startswith("flower:")
    assert any("flower.auth" in line for line in said)
    assert made not in "".join(said)
    assert (
        with_secrets(Settings(auth="keys", flower_auth="me:mine"), tmp_path, print).flower_auth
        == "me:mine"
    )


@pytest.mark.parametrize(
    "named",
    [
        {"relay_allow_remote": True},
        {"curve_secret_file": "k"},
        {"curve_server_key": "k"},
        {"curve_dir": "d"},
    ],
)
def test_keys_are_made_only_where_the_settings_say_nothing_of_them(
    tmp_path: Path, named: dict[str, object]
) -> None:
    asked = Settings(**named)  # type: ignore[arg-type]
    assert with_secrets(asked, tmp_path, print) == asked
    assert with_secrets(Settings(), tmp_path, print).curve_dir == str(
        tmp_path / "secrets" / "curve"
    )


def test_relay_and_worker_find_each_others_keys_in_one_folder(tmp_path: Path) -> None:
    asked = Settings(curve_dir=str(tmp_path / "curve"))
    worker = with_kept_keys(asked, "w1")  # it may come first
    relay = server_keys(asked)
    mine = client_keys(worker.curve_secret_file, worker.curve_server_key)
    assert relay is not None
    assert mine is not None
    assert mine.server == relay.public
    assert relay.clients.key_of("w1") == mine.public
    assert with_kept_keys(asked, "w1") == worker, "as before at the next start"
    assert {mode(path) for path in (tmp_path / "curve").glob("*.key")} == {0o600}
    (tmp_path / "curve" / "clients" / "w1.pub").unlink()  # a crash between the two files
    assert with_kept_keys(asked, "w1").curve_secret_file == worker.curve_secret_file


@pytest.mark.parametrize(("more", "worker"), [({"curve_secret_file": "k"}, "w1"), ({}, "relay")])
def test_ambiguous_key_folders_are_refused(
    tmp_path: Path, more: dict[str, str], worker: str
) -> None:
    with pytest.raises(SettingsError, match=r"curve_dir"):
        with_kept_keys(Settings(curve_dir=str(tmp_path), **more), worker)  # type: ignore[arg-type]
