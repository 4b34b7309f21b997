"""Is a server with published faults named, and no other?"""

from pathlib import Path
from unittest.mock import Mock

import pytest

from midstream.broker.redis_service import opening
from midstream.schemas.settings.settings import Settings
from midstream_ops.advisories import advisory
from midstream_ops.checks import redis_checks
from midstream_ops.checks.service import Service


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ({"redis_version": "7.4.10"}, "CVE-2026-81934"),
        ({"redis_version": "7.4.11"}, ""),
        ({"redis_version": "7.0.15"}, ""),  # Debian's, with fixes of its own
        ({"redis_version": "8.2.3"}, "8.2.9 does not have"),
        ({"redis_version": "255.255.255"}, ""),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.8"}, "Valkey 8.1.8 has known faults"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, ""),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.0-rc1"}, ""),
    ],
)
def test_a_server_with_published_faults_is_named(info: dict[str, str], named: str) -> None:
    found = advisory(info)
    assert named in found
    assert bool(found) is bool(named)


def test_the_doctor_warns_of_a_server_with_published_faults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = {"redis_version": "7.4.10", "connected_clients": 1}
    monkeypatch.setattr(opening, "client", Mock(**{"return_value.info.return_value": info}))
    service = Service(Settings(data_dir=str(tmp_path)), "redis://127.0.0.1:1/0", "")
    findings = redis_checks.redis_server(service)
    assert next(findings).about == "redis"
    warned = next(findings)
    assert warned.about == "redis version"
    assert warned.level == "warn"
    assert "CVE-2026-81934" in warned.found
