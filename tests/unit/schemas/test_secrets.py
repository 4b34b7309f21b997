"""`make lint` finds each kind of secret; files with secrets are closed to other accounts."""

import base64
import os
import secrets
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import check_secrets
import pytest

from midstream.broker.receipts import curve
from midstream.client.sdk import wire
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings import secret_files
from midstream.schemas.settings.settings import SettingsError, load_settings

LETTERS = string.ascii_letters + string.digits


def random(count: int, letters: str = LETTERS) -> str:
    return "".join(secrets.choice(letters) for _ in range(count))


@pytest.mark.matrix
def test_the_history_holds_no_secret_but_the_burnt_ones() -> None:
    assert [*check_secrets.faults(check_secrets.history(), secret_files.BURNT)] == []


def test_a_secret_of_each_kind_is_noticed_where_it_is_written() -> None:
    made = {
        "key": f"ms_{random(12, string.ascii_lowercase + string.digits)}_{random(43)}",
        "webhook": "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode(),
        "AWS": "AKIA" + random(16, string.ascii_uppercase + string.digits),
        "AWS secret": "aws_secret_access_key = " + random(40, LETTERS + "+"),
        "AWS secret without a digit": (
            "aws_secret_access_key = " + random(40, string.ascii_letters)
        ),
        "CURVE": f'secret-key = "{random(20)}{random(20, "#@*!^&<>(){}[]")}"',
        "hub": "hf_" + random(34),
        "PEM": (
            f"-----BEGIN PRIVATE KEY-----\n{base64.b64encode(secrets.token_bytes(48)).decode()}\n"
        ),
        "URL": f"redis://user:{random(24)}@redis:6379/0",
        "password": f'password = "{random(40)}"',
    }
    for kind, text in made.items():
        lines = [*check_secrets.faults([("docs/page.md", f"first\n{text}\n".encode())])]
        assert [line.partition(" ")[0] for line in lines] == ["docs/page.md:2:"], kind
        assert not any(part in lines[0] for part in text.split())
    assert [*check_secrets.faults([("compose/secrets/password", b"short")])] != []


def test_a_burnt_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value = f"ms_{'a' * 12}_{random(43)}"
    assert load_settings({"MIDSTREAM_ADMIN_KEY": value}).admin_key == value
    monkeypatch.setattr(secret_files, "BURNT", {check_secrets.digest(value.encode())})
    with pytest.raises(SettingsError, match="admin_key: this value was published") as refused:
        load_settings({"MIDSTREAM_ADMIN_KEY": value})
    assert value not in str(refused.value)


@pytest.fixture
def opened() -> Iterator[Path]:
    """A folder that every account can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("MIDSTREAM_FLOWER_AUTH_FILE", "user:password", "every account"),
        (
            "MIDSTREAM_CONFIG",
            'flower_auth = "user:password"',
            "contains flower_auth, and every account",
        ),
    ],
)
def test_a_secret_in_a_file_that_every_account_can_read_is_refused(
    opened: Path, variable: str, text: str, reason: str
) -> None:
    file = opened / "secret"
    file.write_text(text)
    file.chmod(0o644)
    with pytest.raises(SettingsError, match=f"{variable}={file}: {reason}"):
        load_settings({variable: str(file)})
    opened.chmod(0o750)
    assert load_settings({variable: str(file)}).flower_auth == "user:password", "it is closed"
    opened.chmod(0o755)
    file.chmod(0o640)
    assert load_settings({variable: str(file)}).flower_auth == "user:password"


def test_a_curve_key_that_every_account_can_read_is_refused(opened: Path) -> None:
    (opened / "key").write_text("key")
    (opened / "key").chmod(0o644)
    with pytest.raises(SettingsError, match=r"curve_secret_file=.*every account"):
        curve.secret_key(str(opened / "key"))


def test_settings_without_a_secret_may_be_readable_to_all(opened: Path) -> None:
    (opened / "midstream.toml").write_text("max_attempts = 4\n")
    (opened / "midstream.toml").chmod(0o644)
    assert load_settings({"MIDSTREAM_CONFIG": str(opened / "midstream.toml")}).max_attempts == 4


def test_the_client_reads_no_key_that_every_account_can_read(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = opened / "key"
    key.write_text("ms_key")
    key.chmod(0o644)
    monkeypatch.setenv("MIDSTREAM_API_KEY_FILE", str(key))
    monkeypatch.delenv("MIDSTREAM_API_KEY", raising=False)
    with pytest.raises(MidstreamError, match="every account of this machine can read"):
        wire.headers(None)
    assert wire.headers("ms_other")["authorization"] == "Bearer ms_other"
    key.chmod(0o600)
    assert wire.headers(None)["authorization"] == "Bearer ms_key"


def test_a_secret_of_a_container_may_be_readable_to_all_in_it(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compose mounts its files read-only, with the mode that they have outside, where their folder
    is closed.
    """
    key = opened / "key"
    key.write_text("user:password")
    key.chmod(0o444)
    assert secret_files.is_exposed(key)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert not secret_files.is_exposed(key)
