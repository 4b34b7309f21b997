"""Are keys of relay and workers checked at start, and is what is wrong with them said without
showing them?
"""

import logging
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from midstream.broker.receipts.curve import (
    KnownClients,
    client_keys,
    new_keys,
    secret_key,
    server_keys,
)
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings, SettingsError


def test_a_new_key_is_readable_by_its_owner_alone_and_never_written_over(tmp_path: Path) -> None:
    private, public = new_keys("worker", "w1", tmp_path / "keys")
    assert private == tmp_path / "keys" / "w1.key"
    assert public == tmp_path / "keys" / "clients" / "w1.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert secret_key(str(private))[0] == public.read_text().strip()
    with pytest.raises(MidstreamError, match=r"w1\.key already exists"):
        new_keys("worker", "w1", tmp_path / "keys")
    with pytest.raises(MidstreamError, match="is not valid as a file name"):
        new_keys("worker", "../w1", tmp_path / "keys")


def of_relay(secret: str, clients: str) -> object:
    return server_keys(Settings(curve_secret_file=secret, curve_clients_dir=clients))


@pytest.mark.parametrize(
    ("keys_of", "given", "says"),
    [
        (of_relay, ("w1.key", ""), r"without curve_clients_dir: .* any sender"),
        (of_relay, ("", "clients"), "without curve_secret_file: the relay needs"),
        (of_relay, ("w1.key", "no"), "'no': No such file"),
        (of_relay, ("gone.key", "clients"), r"gone\.key.*No such"),
        (client_keys, ("w1.key", ""), "without curve_server_key"),
        (client_keys, ("", "~" * 40), "without curve_secret_file: a worker needs"),
        (client_keys, ("w1.key", "~" * 40), "curve_server_key: not a CURVE key"),
    ],
)
def test_keys_that_the_relay_or_a_worker_lacks_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys_of: Callable[..., object],
    given: tuple[str, str],
    says: str,
) -> None:
    new_keys("worker", "w1", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=says):
        keys_of(*given)


def test_no_keys_at_all_are_an_answer() -> None:
    assert client_keys("", "") is None
    assert server_keys(Settings()) is None


def test_an_invalid_curve_key_is_refused_without_quoting_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.key"
    broken.write_text("secret but wrong\n")
    with pytest.raises(SettingsError, match=r"broken\.key.*not a CURVE key") as refused:
        secret_key(str(broken))
    assert "secret but wrong" not in str(refused.value)


def test_allowed_workers_follow_the_key_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("midstream.broker.receipts.curve.LOOK_EVERY_S", 0.0)
    keys = {name: zmq.curve_keypair()[0] for name in ("w1", "w2")}
    for name, key in keys.items():
        (tmp_path / f"{name}.pub").write_bytes(key + b"\n")
    clients = KnownClients(tmp_path)
    assert clients.key_of("w1") == keys["w1"].decode()
    (tmp_path / "w1.pub").unlink()
    assert not clients.callback("midstream", keys["w1"])
    assert clients.key_of("w1") is None
    (tmp_path / "w3.pub").write_text("scribble")
    with caplog.at_level(logging.ERROR):
        assert clients.key_of("w2") == keys["w2"].decode(), (
            "one bad file does not lock out the others"
        )
    assert "w3.pub" in caplog.text


def test_a_missing_key_folder_admits_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.broker.receipts.curve.LOOK_EVERY_S", 0.0)
    key, _ = zmq.curve_keypair()
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "w1.pub").write_bytes(key)
    clients = KnownClients(folder)
    folder.rename(tmp_path / "away")
    assert not clients.callback("midstream", key)
    (tmp_path / "away").rename(folder)
    assert clients.callback("midstream", key)
