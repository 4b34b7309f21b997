"""What does the API answer without this package?"""

import json
import subprocess
import sys

import pytest

from midstream.schemas.packages import installing

#: As on an installation without the packages beside the core: it asks for a path, and prints the
#: answer's status and body.
ALONE = """
import asyncio, importlib.metadata as m, json, sys
m.entry_points = lambda **asked: m.EntryPoints([])
import httpx2
from midstream.api.app import make_app
from midstream.schemas.settings.settings import Settings

async def main(method, path):
    app = make_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    transport = httpx2.ASGITransport(app=app)
    here = "http://127.0.0.1"
    async with app.lifespan(), httpx2.AsyncClient(transport=transport, base_url=here) as client:
        answer = await client.request(method, path)
        print(json.dumps([answer.status_code, answer.json()]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/policies/guard/hits?limit=1"),
        ("PUT", "/v1/policies/guard/hits/job_1_0/mark"),
        ("POST", "/v1/policies/guard/replays"),
        ("DELETE", "/v1/hits/texts"),
    ],
)
def test_calls_on_hits_say_what_has_them(method: str, path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, method, path], capture_output=True, text=True, timeout=120
    )
    status, problem = json.loads(done.stdout or done.stderr)
    assert status == 501
    assert problem["type"] == "urn:midstream:not_installed"
    assert installing("review") in problem["detail"]
