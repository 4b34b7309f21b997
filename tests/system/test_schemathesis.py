"""Does the API do what its own OpenAPI document says, whatever is sent? schemathesis: all checks,
and paths along the links of answers.
"""

import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import httpx2
import pytest
from stack import Stack, stack_with
from tenant_kit import ADMIN, bearer

#: A body may fit the document and not the model that is served (another vocabulary, no such layer,
#: a job that is over): that is told with these, and is no fault. A list that is too long may make a
#: body that is too large (413). Everything else about them is checked.
CONFIG = """
[checks]
max_response_time = 100

[checks.positive_data_acceptance]
expected-statuses = ["2xx", 304, 400, 404, 409, 410, 422, 429, 503, 504, 507]

[checks.negative_data_rejection]
expected-statuses = ["4xx", "5xx"]
"""
#: Seconds of trying every edge of every parameter and field, and then of fuzzing: some operations
#: each time, and enough for all in the matrix.
SECONDS = [45, pytest.param(360, marks=pytest.mark.matrix)]
LINKS_SECONDS = (12, 48, 192)
SEED = 1
#: Only ends what hangs, in seconds.
LONGEST = 500

#: Type of a response → the operations that its answer leads to, and where it has their `job_id`.
LINKS = {
    "JobView": (
        [
            "get /v1/jobs/{job_id}",
            "get /v1/jobs/{job_id}/events",
            "get /v1/jobs/{job_id}/result",
            "post /v1/jobs/{job_id}/cancel",
            "get /v1/captures/{job_id}",
        ],
        "$response.body#/id",
    ),
    "CaptureManifest": (
        ["get /v1/captures/{job_id}/safetensors", "delete /v1/captures/{job_id}"],
        "$response.body#/job",
    ),
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


stack = stack_with(
    api=True,
    auth="keys",
    admin_key=ADMIN,
    max_wait_s=1.0,
    # a worker that stands still is not a dead one
    lease_s=60.0,
    **{"tuning.visibility_timeout_s": 90},
)


def runnable(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document with jobs that this very service runs, so that there is something behind the
    links of their answers.
    """
    document["components"]["schemas"]["JobRequest"] = {
        "type": "object",
        "required": ["model", "prompts", "capture"],
        "additionalProperties": False,
        "properties": {
            "model": {"enum": [model]},
            "prompts": {
                "type": "array",
                "items": {"enum": ["hello", "a b c"]},
                "minItems": 1,
                "maxItems": 2,
            },
            "capture": {"enum": [{"layers": [0, 1], "positions": "all_prompt"}, {"layers": "all"}]},
        },
    }
    return document


def linked(document: dict[str, Any]) -> dict[str, Any]:
    """The document with links from the answers of `LINKS`."""
    operations = {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    answers = [
        (media["schema"].get("$ref", "").rpartition("/")[2], response)
        for operation in operations.values()
        for response in operation["responses"].values()
        for media in response.get("content", {}).values()
    ]
    for kind, response in answers:
        following, place = LINKS.get(kind, ([], ""))
        if ids := [operations[name]["operationId"] for name in following]:
            response["links"] = {
                each: {"operationId": each, "parameters": {"job_id": place}} for each in ids
            }
    return document


def run(
    stack: Stack, folder: Path, document: dict[str, Any], phases: str, seconds: int, *options: str
) -> str:
    """What schemathesis says at the end; fails with what it found."""
    (folder / "config.toml").write_text(CONFIG)
    (folder / "openapi.json").write_text(json.dumps(document))
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    done = subprocess.run(
        [
            str(program),
            "--config-file",
            str(folder / "config.toml"),
            "run",
            str(folder / "openapi.json"),
            "--url",
            stack.url,
            "--header",
            f"Authorization: Bearer {ADMIN}",
            "--checks",
            "all",
            "--phases",
            phases,
            "--max-time",
            str(seconds),
            "--seed",
            str(SEED),
            "--request-timeout",
            "120",
            "--no-shrink",
            "--continue-on-failure",
            "--warnings",
            "off",
            *options,
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Traceback" not in stack.log("api")
    return done.stdout


@pytest.mark.parametrize("seconds", SECONDS)
def test_generated_requests_get_documented_responses(
    stack: Stack, tmp_path: Path, seconds: int
) -> None:
    document = httpx2.get(f"{stack.url}/schema/openapi.json", timeout=60).json()
    all_of_them = f"Tested: {sum(map(len, document['paths'].values()))}"
    said = run(stack, tmp_path, document, "coverage,fuzzing", seconds, "--max-examples", "5")
    assert all_of_them in said or seconds == 45


def test_linked_requests_get_documented_responses(stack: Stack, tmp_path: Path) -> None:
    # the other test may have set any limits
    stack.do(lambda ledger: ledger.redis.delete("ms:tenants"))
    document = linked(httpx2.get(f"{stack.url}/schema/openapi.json", timeout=60).json())
    document = runnable(document, stack.settings.served_model)
    for seconds in LINKS_SECONDS:
        run(
            stack,
            tmp_path,
            document,
            "stateful",
            seconds,
            "--include-path-regex",
            "^/v1/(jobs|captures)",
            "--mode",
            "positive",
        )
        jobs = httpx2.get(
            f"{stack.url}/v1/jobs", params={"limit": 200}, headers=bearer(ADMIN), timeout=60
        ).json()["jobs"]
        followed = set(
            re.findall(
                r'midstream_http_requests_total\{[^}]*path="([^"]*\{job_id\}[^"]*)",status_code="20',
                httpx2.get(f"{stack.url}/metrics", headers=bearer(ADMIN), timeout=60).text,
            )
        )
        if len(followed) >= 2 and "succeeded" in {job["state"] for job in jobs}:
            break
    assert {"succeeded"} <= {job["state"] for job in jobs}
    assert len(followed) >= 2, followed
