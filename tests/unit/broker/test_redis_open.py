"""What of a `redis_url` reaches the clients of Redis, of the sentinels and of Celery; and which
URLs are refused.
"""

from pathlib import Path

import pytest
from kombu.utils.imports import symbol_by_name
from redis.connection import SSLConnection

from midstream.broker.queue.celery_app import channels_of, make_app
from midstream.broker.queue.transport import (
    QueueChannel,
    QueueTransport,
    SentinelChannel,
    SentinelTransport,
    transport_of,
)
from midstream.broker.redis_service import durability as redis_durability, opening as redis_open
from midstream.broker.telemetry import logs
from midstream.schemas.settings.settings import Settings, SettingsError, load_settings

PLAIN = "redis+sentinel://worker:secret@s1:1,s2,[::1]:3/2?service=ms"


def test_a_direct_url_is_opened_as_it_stands() -> None:
    found = redis_open.target_of("rediss://u:p@host:1/2?ssl_ca_certs=/ca")
    assert found.sentinels == []
    assert found.database == 2
    assert found.options["connection_class"] == SSLConnection
    opened = redis_open.broker("rediss://u:p@host:1/2?ssl_ca_certs=/ca")
    assert opened.url == "rediss://u:p@host:1/2?ssl_ca_certs=/ca"
    assert opened.ssl == {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": "/ca",
    }
    assert redis_open.broker("redis://host:1/0").ssl is False


def test_sentinels_are_asked_without_the_users_password_of_redis() -> None:
    found = redis_open.target_of(PLAIN)
    assert found.sentinels == [("s1", 1), ("s2", 26379), ("::1", 3)]
    assert found.service == "ms"
    assert found.database == 2
    assert found.options["username"] == "worker"
    assert found.options["password"] == "secret"
    assert not found.sentinel_options.keys() & {"username", "password", "ssl"}
    assert channels_of(PLAIN) == "/midstream:2."


def test_with_tls_redis_and_sentinels_are_verified(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    url = "rediss+sentinel://api:a%20b@s1/0?service=ms&sentinel_password=c%26d&ssl_ca_certs="
    settings = load_settings({}, redis_url=url + str(ca))
    found = redis_open.target_of(settings.redis_url)
    verified = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": str(ca)}
    assert (
        found.options.items()
        >= ({"ssl": True, "username": "api", "password": "a b"} | verified).items()
    )
    assert found.sentinel_options.items() >= ({"ssl": True, "password": "c&d"} | verified).items()
    pool = redis_open.async_pool(settings.redis_url)
    assert pool.connection_class is redis_open.AsyncMasterSSLConnection
    assert redis_open.broker(settings.redis_url).ssl == verified
    assert redis_open.broker(settings.redis_url).options["sentinel_kwargs"]["password"] == "c&d"


def test_celery_asks_every_sentinel() -> None:
    app = make_app(Settings(redis_url=PLAIN))
    with app.connection_for_write() as connection:
        assert connection.transport_cls == "sentinel"
        assert len(connection.alt) == 3
        assert {(connection.userid, connection.password, connection.virtual_host)} == {
            ("worker", "secret", "2")
        }
    assert app.conf.broker_transport_options["master_name"] == "ms"
    found = [symbol_by_name(transport_of(url)) for url in (PLAIN, "redis://h/0")]
    assert found == [SentinelTransport, QueueTransport]
    assert [each.Channel for each in found] == [SentinelChannel, QueueChannel]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://s1:1/0", "service=NAME"),
        ("redis+sentinel://s1:port/0?service=a", "'s1:port' is not the address of a sentinel"),
        ("redis+sentinel://s1,,s2/0?service=a", "'' is not the address of a sentinel"),
    ],
)
def test_a_sentinel_url_that_cannot_work_is_refused(url: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        redis_open.target_of(url)


def test_a_failover_that_could_lose_jobs_is_refused() -> None:
    with pytest.raises(SettingsError, match="redis_replicas is 0"):
        redis_durability.require(Settings(redis_url=PLAIN))


def test_no_password_of_the_url_is_logged() -> None:
    shown = logs.redacted("rediss+sentinel://api:one@s1:1,s2:2/0?sentinel_password=two&service=ms")
    assert shown == "rediss+sentinel://api:***@s1:1,s2:2/0?sentinel_password=***&service=ms"
