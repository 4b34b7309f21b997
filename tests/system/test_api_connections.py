"""Clients that send or read too slowly, or open too many connections, are refused, and others are
served meanwhile.
"""

import contextlib
import gzip
import re
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from edge import MODEL, Api, Hand, refused, running

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
#: Only ends what hangs: the limits under test are 1 s.
PATIENCE_S = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def hasty(redis_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("hasty")
    with running(
        folder,
        redis_session.url,
        max_wait_s=1.5,
        **{
            "tuning.head_timeout_s": 1,
            "tuning.body_timeout_s": 1,
            "tuning.max_connections": 6,
            "tuning.max_body_mib": 1,
            "tuning.max_file_mib": 2,
        },
    ) as api:
        yield api


def connect(api: Api) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def until_closed(connection: socket.socket, drip: bytes = b"") -> bytes:
    """Everything that is answered until the other side closes; meanwhile `drip` is sent again and
    again.
    """
    answer = b""
    deadline = time.monotonic() + PATIENCE_S
    connection.settimeout(0.1)
    while time.monotonic() < deadline:
        try:
            if drip:
                connection.sendall(drip)
            if not (part := connection.recv(65536)):
                return answer
            answer += part
        except TimeoutError:
            continue
        except ConnectionError:
            return answer
    raise AssertionError(f"the connection was not closed: {answer!r}")


@pytest.mark.parametrize(
    ("sent", "drip", "statuses"),
    [
        (b"", b"", []),
        (b"\r\n", b"", [408]),
        (b"GET /healthz HTTP/1.1\r\n" + HOST, b"X-A: b\r\n", [408]),
        (b"GET /healthz HTTP/1.1\r\nX-A: ", b"b", [408]),
        (POST + b"Content-Length: 1000\r\n\r\n{", b" ", [408]),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n", [408]),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n", b" ", [200]),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\nGET /healthz HTT", b"", [200, 408]),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n", b"\r\n", [200, 408]),
    ],
    ids=[
        "nothing",
        "empty lines",
        "headers",
        "one header",
        "body",
        "chunks",
        "body after the answer",
        "second request",
        "empty lines after an answer",
    ],
)
def test_a_request_that_arrives_too_slowly_is_closed(
    hasty: Api, sent: bytes, drip: bytes, statuses: list[int]
) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        answer = until_closed(connection, drip)
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)] == statuses
    if 408 in statuses:
        assert b"urn:midstream:request_timeout" in answer
        assert b"application/problem+json" in answer


def test_a_request_that_arrives_slowly_but_in_time_is_answered(hasty: Api) -> None:
    """A body that takes longer than a second is not late while enough of it arrives."""
    with connect(hasty) as connection:
        connection.sendall(POST + b"Content-Length: 131073\r\n\r\n{")
        for _ in range(4):
            connection.sendall(b" " * 32768)
            time.sleep(0.5)
        assert connection.recv(64).startswith(b"HTTP/1.1 400")


def test_a_response_held_past_the_limit_becomes_202_with_a_job(hasty: Api) -> None:
    """The limits of sending do not end a connection that waits for its answer."""
    body = {"model": MODEL, "prompt": "hello"}
    with Hand(hasty.settings):
        answer = hasty.http.post("/v1/completions", json=body)
        streamed = hasty.http.post("/v1/completions", json={**body, "stream": True})
    assert answer.status_code == 202
    assert answer.json()["state"] == "queued"
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    assert '"error"' in streamed.text
    assert "[DONE]" not in streamed.text


@pytest.mark.parametrize(
    "head", [b"X-A: " + b"a" * 70_000, b"".join(b"X-%d: a\r\n" % i for i in range(9000))[:-2]]
)
def test_long_headers_are_refused(hasty: Api, head: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + head + b"\r\n\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 431")
    with connect(hasty) as connection:  # and those that never end
        connection.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + head)
        assert until_closed(connection).startswith(b"HTTP/1.1 431")


@pytest.fixture
def crowded(redis_session: Any, tmp_path: Path) -> Iterator[Api]:
    """Six connections, and no time limit that a busy machine could reach."""
    with running(tmp_path, redis_session.url, **{"tuning.max_connections": 6}) as api:
        yield api


def test_idle_connections_make_room_and_health_is_answered_beyond_the_limit(crowded: Api) -> None:
    job = (
        b"POST /v1/jobs HTTP/1.1\r\n"
        + HOST
        + (b"Content-Type: application/json\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
    )
    url = crowded.url
    idle = connect(crowded)  # has been answered, so nothing else ends it for a minute
    idle.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
    answer = b""
    while not answer.endswith(b"}"):  # head and body may arrive apart
        part = idle.recv(4096)
        assert part, answer
        answer += part
    assert answer.startswith(b"HTTP/1.1 200")
    busy = [connect(crowded) for _ in range(6)]
    try:
        assert until_closed(idle) == b"", "the one that waited longest made room"
        for connection in busy:
            connection.sendall(job)
            assert connection.recv(64).startswith(b"HTTP/1.1 100")
        assert httpx2.get(f"{url}/healthz", timeout=PATIENCE_S).status_code == 200
        answer = httpx2.get(f"{url}/v1/models", timeout=PATIENCE_S)
        refused(answer, 503, kind="overloaded")
        assert int(answer.headers["retry-after"]) >= 1
    finally:
        for connection in [idle, *busy]:
            connection.close()


# --- Bodies
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [1.1, 3])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413_whether_or_not_its_length_is_announced(
    hasty: Api, mib: float, chunked: bool
) -> None:
    body = b'{"model":"' + b"x" * int(mib * (1 << 20)) + b'"}'
    content = iter([body[: 1 << 19], body[1 << 19 :]]) if chunked else body
    headers = {"Content-Type": "application/json"}
    answer = hasty.http.post("/v1/jobs", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
    assert str(1 << 20) in answer.json()["allowed"]


def test_a_body_that_never_ends_is_cut(api: Api) -> None:
    piece = b"100000\r\n" + b" " * MIB + b"\r\n"
    sent = 0
    answer = b""
    tuning = api.settings.tuning
    most = (2 * tuning.max_file_mib + 32) * MIB  # and what sockets hold
    with connect(api) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n")
        while sent < 2 * most:
            connection.sendall(piece)
            sent += len(piece)
            if select.select([connection], [], [], 0)[0]:
                answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent < most


@pytest.mark.long
@pytest.mark.parametrize(("mib", "status"), [(1.5, 400), (2.5, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_has_a_limit_of_its_own_and_leaves_nothing_on_disk(
    hasty: Api, mib: float, status: int, chunked: bool
) -> None:
    body = bytes(int(mib * (1 << 20)))
    answer = hasty.http.put(
        "/v1/artifacts/modules/m",
        content=iter([body[: 1 << 19], body[1 << 19 :]]) if chunked else body,
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code == status, answer.text
    if status == 413:
        assert "MIDSTREAM_MAX_FILE_MIB" in answer.json()["allowed"]
    assert list((Path(hasty.settings.data_dir) / "uploads").iterdir()) == []


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 99999999999\r\n",
        b"PUT /v1/artifacts/modules/m HTTP/1.1\r\n"
        + HOST
        + b"Content-Type: application/octet-stream\r\nContent-Length: 3145728\r\n",
    ],
    ids=["body", "file"],
)
def test_a_body_announced_too_long_is_refused_before_it_is_sent(hasty: Api, head: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_a_compressed_body_is_refused_before_it_is_read(hasty: Api) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    for media in ("application/json", "application/octet-stream"):
        headers = {"Content-Type": media, "Content-Encoding": "gzip"}
        refused(
            hasty.http.put("/v1/artifacts/modules/m", content=bomb, headers=headers),
            415,
            "Content-Encoding",
        )


def test_a_file_that_the_disk_refuses_is_503(hasty: Api) -> None:
    uploads = Path(hasty.settings.data_dir) / "uploads"
    uploads.mkdir(exist_ok=True)
    away = uploads.rename(uploads.with_name("uploads.away"))
    uploads.write_text("no folder")  # stands for what a disk may refuse
    try:
        refused(
            hasty.http.put(
                "/v1/artifacts/modules/m",
                content=b"x",
                headers={"Content-Type": "application/octet-stream"},
            ),
            503,
            kind="unavailable",
        )
    finally:
        uploads.unlink()
        away.rename(uploads)
