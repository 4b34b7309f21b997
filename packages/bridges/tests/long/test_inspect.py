"""Evaluation libraries, as they are published, run against the demo model: Inspect AI through the
provider `midstream/<model>`, lm-evaluation-harness through `/v1/completions`.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai_answers import TOOL_PARSER
from stack import Stack
from tree import ROOT

from midstream.client import Client
from midstream_ops.demo_model import fetch_demo_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.packages]
HIDDEN = 576


@pytest.fixture(scope="module")
def python(library) -> Path:
    return library("inspect")


@pytest.fixture(scope="module")
def service(serve) -> Stack:
    return serve(tool_parser=TOOL_PARSER)


def program(
    command: Path, service: Stack, folder: Path, *arguments: str, cwd: Path | None = None
) -> str:
    """Its output.

    Inspect's cache and traces lie in `folder`, where it is run unless `cwd` is given.
    """
    own = {
        "MIDSTREAM_PUBLIC_URL": service.url,
        "INSPECT_CACHE_DIR": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    done = subprocess.run(
        [str(command), *arguments],
        cwd=cwd or folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(python: Path, service: Stack, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tools/peers/inspect_calls.py reports."""
    folder = tmp_path_factory.mktemp("calls")
    vector = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32) * 8
    with Client(service.url) as client:
        client.modules.put("shift", [{"layers": 15, "vector": vector}])
    printed = program(
        python,
        service,
        folder,
        str(ROOT / "tools" / "peers" / "inspect_calls.py"),
        service.url,
        str(folder / "logs"),
    )
    return json.loads(printed.splitlines()[-1])


def test_a_sample_sets_modules_patches_and_captures_of_its_own(found: Any, service: Stack) -> None:
    samples = found["samples"]
    texts = {samples[name]["text"] for name in ("plain", "module", "patched")}
    assert len(texts) == 3, "each changes the answer"
    assert samples["captured"]["text"] == samples["plain"]["text"]
    ours = samples["captured"]["ours"]
    assert ours["capture_results"]["status"] == "ok"
    assert ours["capture_results"]["job"] == ours["job"]
    assert samples["module"]["ours"]["determinism"]["consistent"] is True
    with Client(service.url) as client:
        assert client.capture(ours["job"]).array(10).shape[1] == HIDDEN


def test_arguments_of_the_model_hold_unless_a_sample_replaces_them(found: Any) -> None:
    samples = found["samples"]
    assert found["model"]["module"]["text"] == samples["module"]["text"]
    assert found["model"]["over"]["text"] == samples["plain"]["text"]
    assert found["ignored"]["graded"]["text"] == samples["plain"]["text"]


def test_the_cache_tells_contents_apart_and_not_names(found: Any) -> None:
    first, same, replaced, steered, cleared, away, later = found["keys"]
    assert first == same
    assert len({first, replaced, steered}) == 3
    assert cleared == replaced
    assert away != later, (
        "of a service that does not say what it serves, nothing is taken from the cache"
    )


def test_a_mistake_fails_the_sample_with_the_text_that_names_it(found: Any) -> None:
    assert (
        "metadata 'midstream' of sample 'unknown': unknown field 'moduls'; valid: steering"
    ) in found["samples"]["unknown"]["error"]
    assert "nobody" in found["samples"]["missing"]["error"]
    assert found["samples"]["plain"]["error"] is None
    texts = (
        "unknown field 'moduls'",
        "steering[0].layer: unknown field",
        "modules: must be a name",
        "per_sample: 'no' is not true or false",
    )
    assert all(text in error for text, error in zip(texts, found["refused"], strict=True)), found[
        "refused"
    ]


def test_a_cached_answer_is_of_the_same_interventions(found: Any) -> None:
    first, second, steered = (each["plain"] for each in found["cached"])
    assert first["cached"] == ["write"]
    assert second["cached"] == ["read"]
    assert steered["cached"] == ["write"]
    assert first["text"] == second["text"] == found["samples"]["plain"]["text"]
    assert steered["text"] == found["samples"]["module"]["text"]


def test_a_tool_is_called(found: Any) -> None:
    assert found["called"] in (["Paris"], ["Oslo"])
    assert found["tools"]["tools"]["error"] is None
    assert found["tools"]["tools"]["messages"] == ["user", "assistant", "tool"]


def test_what_the_service_cannot_take_now_is_asked_again(found: Any) -> None:
    patient = found["patient"]
    assert patient["text"] == "at last"
    assert patient["error"] is None
    assert len(patient["cached"]) == 3
    assert patient["decisions"] == [[True, "rate_limit", 7.0], [True, "transient", 2.0]]


def test_an_error_of_the_service_is_not_asked_again(found: Any) -> None:
    failed = found["failed"]
    assert "not now" in failed["error"]
    assert failed["left"] == 1, "of two answers one is fetched"
    assert failed["decisions"] == [[False, "transient", None]]


def test_the_command_line_takes_arguments_of_the_model(
    found: Any, python: Path, service: Stack, tmp_path: Path
) -> None:
    tokens = 8
    question = json.loads(
        (ROOT / "examples" / "data" / "opinions.jsonl").read_text().splitlines()[0]
    )["input"]
    texts = {}
    for argument in ("modules=shift", 'steering=[{"module": "shift", "scale": 0.5}]'):
        logs = tmp_path / str(len(texts))
        said = f"--log-dir {logs} --log-format json --display none -T tokens={tokens} --limit 1"
        model = ["--model", "midstream/demo", "-M", argument]
        task = ["eval", "examples/inspect_steering.py", *model, *said.split()]
        program(python.with_name("inspect"), service, tmp_path, *task, cwd=ROOT)
        (log,) = logs.glob("*.json")
        texts[argument] = json.loads(log.read_text())["samples"][0]["output"]["choices"][0][
            "message"
        ]["content"]
    with Client(service.url) as client:
        asked = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": tokens,
        }
        whole, half = (
            client.chat("demo", **asked, steering={"module": "shift", "scale": scale}).text
            for scale in (1.0, 0.5)
        )
    assert list(texts.values()) == [whole, half]
    assert whole != half


def test_the_example_scores_the_module_higher(python: Path, service: Stack, tmp_path: Path) -> None:
    printed = program(
        python,
        service,
        tmp_path,
        str(ROOT / "examples" / "inspect_steering.py"),
        "--logs",
        str(tmp_path / "logs"),
    )
    print(printed)
    assert (
        len(
            re.findall(
                r"^with.*: [-+][0-9.]+ \(standard error [0-9.]+, 40 samples\)$",
                printed,
                re.MULTILINE,
            )
        )
        == 2
    )
    difference, error = map(
        float,
        re.search(r"^difference: (\S+) \(standard error (\S+)\)$", printed, re.MULTILINE).groups(),
    )  # type: ignore[union-attr]
    assert difference > 2 * error


# --- lm-evaluation-harness reads log-likelihoods from completions, steered and not ----------------


#: Run by hand: a minute of downloads for an environment of its own.
SCALE = -0.5
#: Of a sum over a few tokens in float32, which depends on the batch by 1e-5.
ATOL = 1e-4


@pytest.fixture(scope="module")
def command(library) -> Path:
    return library("lm-eval").with_name("lm_eval")


@pytest.fixture(scope="module")
def steered(serve) -> Stack:
    stack = serve()
    vector = np.random.default_rng(0).standard_normal(576).astype(np.float32)
    with Client(stack.url) as client:
        client.modules.put("shift", [{"layers": 15, "vector": vector}])
    return stack


def evaluated(command: Path, url: str, folder: Path) -> list[dict[str, Any]]:
    """The samples of an evaluation at the endpoint `url`: batches of eight prompts, each a list of
    token ids.
    """
    model = (
        f"model=demo,base_url={url},tokenizer={fetch_demo_model()},"
        "tokenizer_backend=huggingface,max_length=512"
    )
    task = "--tasks examples/lm_eval/outlook.yaml --batch_size 8 --log_samples"
    chosen = ["--model", "local-completions", "--model_args", model, *task.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [str(command), *chosen, "--output_path", str(folder / "results")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (samples,) = (folder / "results").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def likelihood(client: Client, context: str, end: str, **steering: Any) -> tuple[float, bool]:
    """The log-likelihood of `end` behind `context`, and whether each of its tokens is the
    likeliest.
    """
    said = client.completion(
        "demo", context + end, max_tokens=0, temperature=0, echo=True, logprobs=1, **steering
    ).raw["choices"][0]["logprobs"]
    ends = [at for at, offset in enumerate(said["text_offset"]) if offset >= len(context)]
    assert "".join(said["tokens"][at] for at in ends) == end
    likeliest = all(
        said["token_logprobs"][at] == max(said["top_logprobs"][at].values()) for at in ends
    )
    return sum(said["token_logprobs"][at] for at in ends), likeliest


def test_log_likelihoods_are_those_of_the_client_steered_and_not(
    command: Path, steered: Stack, tmp_path: Path
) -> None:
    endpoint = f"{steered.url}/v1/completions"
    ways: dict[str, Any] = {
        "": {},
        f"?module=shift:{SCALE}": {"steering": {"module": "shift", "scale": SCALE}},
    }
    found = []
    with Client(steered.url) as client:
        for number, (suffix, steering) in enumerate(ways.items()):
            samples = evaluated(command, endpoint + suffix, tmp_path / str(number))
            assert len(samples) == 40
            pairs = [
                (sample["doc"]["text"], end, response)
                for sample in samples
                for end, response in zip(
                    sample["doc"]["choices"], sample["filtered_resps"], strict=True
                )
            ]
            expected = [likelihood(client, context, end, **steering) for context, end, _ in pairs]
            theirs = np.array([float(response[0]) for _, _, response in pairs])
            np.testing.assert_allclose(theirs, [value for value, _ in expected], rtol=0, atol=ATOL)
            assert [str(response[1]) == "True" for _, _, response in pairs] == [
                likeliest for _, likeliest in expected
            ]
            found.append(dict(zip([pair[:2] for pair in pairs], theirs, strict=True)))
    plain, steered = found
    assert plain.keys() == steered.keys()
    assert min(abs(plain[pair] - steered[pair]) for pair in plain) > ATOL, "the module changes each"
