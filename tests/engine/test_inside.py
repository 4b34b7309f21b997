"""Rows inside attention and MLP are transformers', in its shapes. Real vLLM, tiny models in fp32."""

from pathlib import Path

import msgspec
import pytest
from host import Host, prompt_of, relative_error
from inside_reference import InsideReference
from tiny import LAYERS
from tolerances import FP32_ROWS

from midstream.api.resolve.captures import Bounds, PromptFacts, resolve_captures
from midstream.client.captures.blobs import at
from midstream.client.captures.reader import CaptureReader
from midstream.schemas.jobs import Job
from midstream.schemas.models import ModelInfo
from midstream.schemas.selectors import INSIDE
from midstream.schemas.specs import CaptureSpec


@pytest.fixture(scope="module")
def inside(llama: Path) -> InsideReference:
    return InsideReference(llama)


def captured(host: Host, job: Job, **spec) -> Job:
    """The job with a capture as a user writes it."""
    info = msgspec.convert(host.info, ModelInfo)
    bounds = Bounds(info, [PromptFacts(len(prompt.token_ids)) for prompt in job.prompts], job.sampling.max_tokens)
    return msgspec.structs.replace(job, captures=resolve_captures(msgspec.convert(spec, CaptureSpec), bounds))


def served(host: Host) -> list[str]:
    return [hook for hook in INSIDE if hook in host.info["hooks"]]


def compare(reader: CaptureReader, rows: dict, hooks: list[str], request: int = 0) -> int:
    """Every captured row with the reference's; how many sites were compared."""
    positions = reader.positions(request)
    for hook in hooks:
        assert reader.layers(request, hook) == list(range(LAYERS))
        for layer in range(LAYERS):
            assert relative_error(reader.array(layer, hook, request), rows[hook, layer][positions]) <= FP32_ROWS, (hook, layer)
    return len(hooks) * LAYERS


def test_rows_inside_are_those_of_transformers(v1: Host, inside: InsideReference) -> None:
    """In one capture with the residual stream; the prompt is prefilled in chunks, and another request runs beside it."""
    hooks = served(v1)
    assert hooks == [hook for hook in INSIDE if hook != "router"]
    spec = {"hooks": dict.fromkeys([*hooks, "post_block"], "all"), "positions": "all"}
    job = captured(v1, v1.job(prompt_of(90), max_tokens=4), **spec)
    beside = captured(v1, v1.job(prompt_of(9, seed=3), max_tokens=6), hooks={"hook_z": "all", "mlp.hook_post": [1]}, positions="all")
    outputs = v1.run(job, beside)
    reader = v1.capture(job)
    tokens = [*prompt_of(90), *outputs[job.id][0].token_ids][:-1]
    assert compare(reader, inside.rows(tokens), [*hooks, "post_block"]) == 8 * LAYERS
    other = v1.capture(beside)
    assert other.hooks() == ["z", "mlp_act"]
    rows = inside.rows([*prompt_of(9, seed=3), *outputs[beside.id][0].token_ids][:-1])
    assert relative_error(other.array(1, "mlp.hook_post"), rows["mlp_act", 1]) <= FP32_ROWS
    assert relative_error(other.array(2, "z"), rows["z", 2]) <= FP32_ROWS


def test_one_capture_of_several_widths_is_read_as_one(v1: Host) -> None:
    job = captured(v1, v1.job(prompt_of(12), max_tokens=2), hooks={"k": [0], "q": [0, 3], "resid_post": "all"}, positions="all_prompt")
    v1.run(job)
    assert len(v1.receipts(job)[0].files) == 3
    reader = v1.capture(job)
    assert (reader.hooks(), reader.layers(hook="q")) == (["q", "k", "post_block"], [0, 3])
    assert (reader.array(0, "k").shape, reader.array(3, "hook_rot_q").shape) == ((12, 64), (12, 128))
    assert (reader.manifest().all_sites, all(check.ok for check in reader.verify())) == (
        {"q": [0, 3], "k": [0], "post_block": [0, 1, 2, 3]},
        True,
    )
    kept = [at(v1.root / file.path, file.offset, file.bytes) for file in v1.receipts(job)[0].files if "k" not in file.sites]
    with pytest.raises(Exception, match=r"incomplete: missing tensors \(1\): k.0"):
        CaptureReader.of_job(kept, job.id, status="ok").array(0, "post_block")
