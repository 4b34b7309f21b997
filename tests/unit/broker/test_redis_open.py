"""What of a `redis_url` reaches the clients of Redis and of Celery?"""

import pytest
import redis
from kombu.utils.imports import symbol_by_name
from redis.connection import SSLConnection

from midstream.broker.queue.celery_app import channels_of
from midstream.broker.queue.transport import TRANSPORT, QueueTransport
from midstream.broker.redis_service import opening
from midstream.broker.telemetry import logs
from midstream.schemas.settings.settings import SettingsError, load_settings

TLS = "rediss://u:p@host:1/2?ssl_ca_certs=/ca"


def test_clients_get_what_the_url_says() -> None:
    pool = opening.client(TLS).connection_pool
    assert issubclass(pool.connection_class, SSLConnection)
    assert (
        pool.connection_kwargs.items() >= {"host": "host", "db": 2, "ssl_ca_certs": "/ca"}.items()
    )


def test_celery_verifies_the_certificate() -> None:
    assert opening.tls_of(TLS) == {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": "/ca",
    }
    assert opening.tls_of("redis://host:1/0") is False


def test_celerys_channels_are_those_of_the_database() -> None:
    assert channels_of(TLS) == "/midstream:2."


def test_workers_take_messages_by_our_transport() -> None:
    assert symbol_by_name(TRANSPORT) is QueueTransport


def test_a_list_of_sentinels_is_refused() -> None:
    with pytest.raises(SettingsError, match="not a URL of Redis"):
        load_settings({}, redis_url="redis+sentinel://s1:1,s2:2/0?service=ms")


@pytest.mark.parametrize(
    "error",
    [
        redis.ReadOnlyError("You can't write against a read only replica."),
        redis.ResponseError("Error running script: @user_script: 3: -READONLY You can't write"),
    ],
    ids=["command", "script of Redis 6.2"],
)
def test_a_refusal_of_a_replica_is_recognised(error: redis.ResponseError) -> None:
    assert opening._is_of_replica(error)


def test_no_password_of_the_url_is_logged() -> None:
    assert logs.redacted("rediss://api:one@s1:1/0") == "rediss://api:***@s1:1/0"
