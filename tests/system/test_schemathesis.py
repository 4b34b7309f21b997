"""Does the API do what its own OpenAPI document says, whatever is sent? schemathesis: all checks, and paths along the links of answers."""

import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stack import Stack
from tenant_kit import ADMIN

#: A body may fit the document and not the model that is served (another vocabulary, no such layer, a job that is over): that is told
#: with these, and is no fault. Everything else about them is checked.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 304, 400, 404, 409, 410, 422, 429, 503, 504, 507]
"""
SECONDS = 25  # of fuzzing and of following links, after every edge of every parameter and field was tried once
SEED = 1


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with Stack(folder, api=True, auth="keys", admin_key=ADMIN, max_wait_s=1.0, steering_wait_s=2.0) as stack:
        yield stack


def test_every_answer_to_generated_requests_is_one_that_the_document_promises(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    done = subprocess.run(
        [
            str(program), "--config-file", str(tmp_path / "config.toml"), "run", f"{stack.url}/schema/openapi.json",
            "--header", f"Authorization: Bearer {ADMIN}", "--checks", "all", "--phases", "coverage,fuzzing,stateful",
            "--max-examples", "5", "--max-time", str(SECONDS), "--seed", str(SEED), "--request-timeout", "30",
            "--no-shrink", "--continue-on-failure", "--warnings", "off",
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    operations = sum(len(methods) for methods in httpx.get(f"{stack.url}/schema/openapi.json").json()["paths"].values())
    assert f"Tested: {operations}" in done.stdout
    assert "Traceback" not in stack.log("api")
