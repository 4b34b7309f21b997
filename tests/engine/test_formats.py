"""A constraint on the generated text holds with both runners, beside captures and edits, and changes no other request."""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error
from reference import Edit, Reference
from tiny import HIDDEN, LAYERS
from tolerances import FP32_ROWS

from midstream.schemas.jobs import Structured
from midstream.schemas.selectors import HOOKS

#: Tokens of the tiny model are words: the token with id n reads `wn`.
ALLOWED = (7, 90, 400)
FORM = Structured(regex=f"({'|'.join(f'w{token}' for token in ALLOWED)})+")
EVERYTHING = {hook: list(range(LAYERS)) for hook in HOOKS}


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_a_constrained_request_is_captured_and_steered(engine: str, reference: Reference, request: pytest.FixtureRequest) -> None:
    host: Host = request.getfixturevalue(engine)
    edit = Edit(1, np.random.default_rng(3).normal(size=HIDDEN).astype(np.float32), hook="post_attn")
    capture = capture_of([], "all", sites=EVERYTHING)
    prompt, neighbour = prompt_of(20, seed=8), prompt_of(12, seed=9)
    (alone,) = host.run(plain := host.job(neighbour, max_tokens=5))[plain.id]
    job = host.job(prompt, max_tokens=5, capture=capture, steering=host.steering(edit), structured_outputs=FORM)
    beside = host.job(neighbour, max_tokens=5)
    answers = host.run(job, beside)
    tokens = answers[job.id][0].token_ids
    assert len(tokens) == 5
    assert set(tokens) <= set(ALLOWED)
    assert answers[beside.id][0].token_ids == alone.token_ids
    rows, found = reference.rows(prompt + tokens[:-1], [edit], capture.at), host.capture(job)
    for hook in HOOKS:
        for layer in range(LAYERS):
            assert relative_error(found.array(layer, hook), rows[hook, layer]) <= FP32_ROWS, (hook, layer)


def test_a_constraint_that_does_not_compile_fails_its_own_job_alone(v1: Host) -> None:
    broken, job = v1.job(prompt_of(9), structured_outputs=Structured(regex="[(")), v1.job(prompt_of(9))
    answer = v1.run_any(broken, job)
    assert set(answer.errors) == {broken.id}
    assert answer.errors[broken.id].startswith("structured_outputs: ")
    assert len(answer.outputs[job.id][0].token_ids) == 4
