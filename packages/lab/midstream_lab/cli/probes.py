"""What `fit` does with probes: learns them from a file of labelled texts."""

from typing import Any, Literal

import msgspec
import numpy as np

from midstream.client.captures.row_matrix import samples
from midstream.client.cli import options
from midstream.client.cli.terminal import Connector, first_model, out
from midstream.client.extras import need
from midstream.client.sdk.client import Client
from midstream.client.values import checked
from midstream.schemas.artifacts.probes import Probe
from midstream.schemas.base.errors import invalid
from midstream.schemas.prompts.chat import Conversation
from midstream.schemas.prompts.selectors import HookName, RequestedPositions

from ..client.probes import LEAST, check_labels, classes_of, fit
from ..show.probes import measured

#: The beginning of a source of examples: a policy, whose marked hits they are.
HITS = "hits:"
#: The class of hits that are marked as false alarms.
FALSE_ALARM = "false_alarm"


class TrainingLine(msgspec.Struct):
    """A line of a training file of a probe."""

    text: str | Conversation
    label: str | int | bool


class TrainingHit(msgspec.Struct):
    """A marked hit of a policy."""

    text: list[int]  # the tokens up to the hit's
    label: str


TrainingSource = list[TrainingLine] | list[TrainingHit]


def probe(
    connect: Connector,
    name: str,
    file: str,
    /,
    *,
    layer: int | None = None,
    hook: str = "post_block",
    rows: Literal["last", "mean", "all"] = "last",
    positions: RequestedPositions | None = None,
    held_out: float = 0.25,
    strength: float = 1.0,
    positive: str | int | bool | None = None,
    model: str | None = None,
    labels: Any = None,
    thresholds: Any = None,
    aggregation: Any = None,
    decay: Any = None,
    at: Any = None,
    description: Any = None,
) -> Probe:
    """Capture rows of labelled texts, fit a probe on them, show its metrics on held-out texts, and
    register it. A line of the file has `text`, which may be a conversation, and `label`. In place
    of a file, `hits:POLICY` takes that policy's hits which are marked as right, which become the
    positive class, or as false alarms; its rows are those of their tokens, by default at the site
    of the policy's probe.

    `rows`: of a text, of its last token, their mean, or all; `positions`: of these, as of a
    capture. `strength`: scikit-learn's C. `positive`: which of two classes has the high scores, see
    `midstream.probes.fit`. Those after `model` are of `PUT /v1/artifacts/probes/{name}`.
    """
    need("probes", "fitting a probe")
    client = connect()
    examples: TrainingSource
    if file.startswith(HITS):
        policy = file.removeprefix(HITS)
        examples = _marked(client, policy, model)
        positive = positive or next(each.label for each in examples if each.label != FALSE_ALARM)
        if layer is None:
            site = client.policies.get(policy, model).current.probe.content
            layer = site.layer
            hook = site.hook
    else:
        read = options.rows(file, TrainingLine.__struct_fields__)
        examples = checked(read, list[TrainingLine], "FILE")
    least = LEAST if rows != "all" else 2  # a text may have several rows, but is on one side
    classes = classes_of([example.label for example in examples], positive, "FILE", least)
    check_labels(labels, classes)
    served = model or first_model(client)
    if layer is None:
        last = client.model(served)["num_layers"] - 1
        raise invalid("layer", "is required", f"0 to {last}", "give it as --set layer=…")
    matrix, groups = _rows(
        client, served, examples, layer=layer, hook=hook, rows=rows, positions=positions
    )
    found = fit(
        matrix,
        [examples[group].label for group in groups],
        positive=classes[1] if len(classes) == 2 else None,
        groups=groups,
        held_out=held_out,
        strength=strength,
        layer=layer,
        hook=hook,
    )
    out.print(measured(found.metrics))
    return client.probes.put(
        name,
        found,
        model=served,
        labels=labels,
        thresholds=thresholds,
        aggregation=aggregation,
        decay=decay,
        at=at,
        description=description,
    )


def _marked(client: Client, policy: str, model: str | None) -> list[TrainingHit]:
    """Return the marked hits of a policy as examples: those that are right have the label of its
    probe, or `right` if there are several.
    """
    hits = client.hits.examples(policy, model=model)
    labels = {hit.label for hit in hits}
    right = labels.pop() if len(labels) == 1 else "right"
    return [
        TrainingHit(text=hit.token_ids, label=right if hit.right else FALSE_ALARM) for hit in hits
    ]


def _rows(
    client: Client,
    model: str,
    examples: TrainingSource,
    layer: int,
    hook: HookName | str,
    rows: Literal["last", "mean", "all"],
    positions: RequestedPositions | None,
) -> tuple[np.ndarray, list[int]]:
    """Capture the rows of the examples; return `[samples, hidden]`, and the index of each sample's
    example.
    """
    capture = {
        "layers": [layer],
        "hook": hook,
        "positions": positions or ("last_prompt" if rows == "last" else "all_prompt"),
        "tag": "probe-training",
    }
    of_text = isinstance(examples[0], TrainingHit) or isinstance(examples[0].text, str)
    inputs: Any = {"prompts" if of_text else "messages": [example.text for example in examples]}
    result = client.run(model=model, capture=capture, max_tokens=0, **inputs)
    groups = [sample.request for sample in samples(client.capture(result), rows)]
    matrix = client.captures.matrix([result], layer, hook, rows)
    client.captures.delete(result)
    return matrix, groups
