"""Configs with a field changed: each is served with transformers' numbers, or refused at the start
with a reason.

    make perturbed            # all of it; writes the table of docs/reference/fidelity.md
    make perturbed NAMES="OlmoeForCausalLM …"   # only these classes; other rows stay

Stock vLLM leaves out fields that transformers reads, and which ones differs from version to
version. A tiny checkpoint is made by transformers with the field set, an engine is started on it,
and what it serves is compared with transformers here, whatever the engine's own certificate says.
"""

import copy
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from families import configs
from fidelity import ALL, PROMPT, nursery_for, options_of
from fidelity_page import Way
from host import Host, prompt_of
from nursery import Nursery
from reference import Reference
from tolerances import FP32_HOOKS, FP32_LOGPROBS

from midstream.schemas.requests.specs import StoredCapture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "fidelity.md"
BEGIN = "<!-- written by `make perturbed` -->"
END = "<!-- end of the part written by `make perturbed` -->"
#: Least change of transformers' own logits, relative: a field that changes less shows nothing here.
SHOWS = 1e-4
#: The last exception of a log: its class, and what it says.
_RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Uncertified|Exception)): (.*)$", re.M)
LANES = 2


def rope(kind: str = "default", theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
#: Architecture → changes of its config, each by itself.
CHANGES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "LlamaForCausalLM": [
        rope(theta=50.0),
        rope("linear", factor=4.0),
        rope("llama3", **_LLAMA3),
        rope("yarn", **_YARN),
        {"rms_norm_eps": 0.5},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"head_dim": 64},
        {"tie_word_embeddings": True},
    ],
    "MistralForCausalLM": [
        {"sliding_window": 4},
        {"sliding_window": None},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.5},
    ],
    "Qwen2ForCausalLM": [
        rope(theta=50.0),
        {"rms_norm_eps": 0.5},
        {"hidden_act": "gelu"},
    ],
    "Qwen2MoeForCausalLM": [
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"qkv_bias": False},
    ],
    "Qwen3ForCausalLM": [
        {"attention_bias": True},
        {"rms_norm_eps": 0.5},
        {"hidden_act": "gelu"},
        rope("yarn", **_YARN),
    ],
    "Qwen3MoeForCausalLM": [
        {"norm_topk_prob": True},
        {"attention_bias": True},
        {"mlp_only_layers": [1]},
        {"rms_norm_eps": 0.5},
        {"hidden_act": "gelu"},
    ],
    "MixtralForCausalLM": [
        {"sliding_window": 4},
        {"rms_norm_eps": 0.5},
        {"hidden_act": "gelu"},
    ],
    "OlmoeForCausalLM": [
        {"norm_topk_prob": True},
        {"clip_qkv": 0.3},
        {"rms_norm_eps": 0.5},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
    "StableLmForCausalLM": [
        {"hidden_act": "gelu"},
        {"use_qkv_bias": True},
        {"use_parallel_residual": True},
        {"qk_layernorm": True},
        {"layer_norm_eps": 0.5},
        rope(partial_rotary_factor=0.5),
    ],
    "GptOssForCausalLM": [
        {"rms_norm_eps": 0.5},
        {"swiglu_limit": 0.2},
        {"attention_bias": False},
        {"sliding_window": 4},
    ],
    "GraniteMoeForCausalLM": [
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.5},
        {"residual_multiplier": 0.3},
        {"logits_scaling": 4.0},
    ],
    "GraniteForCausalLM": [
        {"attention_multiplier": 0.05},
        {"embedding_multiplier": 4.0},
        {"residual_multiplier": 0.3},
        {"logits_scaling": 4.0},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
    ],
    "GraniteMoeHybridForCausalLM": [
        {"mamba_conv_bias": False},
        {"mamba_proj_bias": True},
        {"hidden_act": "gelu"},
    ],
    "FalconH1ForCausalLM": [
        {"mamba_norm_before_gate": False, "mamba_rms_norm": True},
        {"time_step_limit": [0.5, 0.7]},
        {"mamba_rms_norm": True},
        {"mamba_conv_bias": False},
        {"mamba_proj_bias": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"key_multiplier": 0.3},
    ],
    "NemotronHForCausalLM": [
        {"mlp_hidden_act": "silu"},
        {"use_bias": True},
        {"layer_norm_epsilon": 0.5},
        {"time_step_min": 0.5},
    ],
    "Mamba2ForCausalLM": [
        {"use_conv_bias": False},
        {"use_bias": True},
        {"time_step_limit": [0.5, 0.7]},
        {"layer_norm_epsilon": 0.5},
    ],
    "FalconForCausalLM": [
        {"activation": "relu"},
        {"activation": "gelu_pytorch_tanh"},
        {"parallel_attn": False},
        {"new_decoder_architecture": True},
        {"alibi": True},
        {"layer_norm_epsilon": 0.5},
    ],
    "DeepseekV2ForCausalLM": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rms_norm_eps": 0.5},
        {"routed_scaling_factor": 3.0},
        {"hidden_act": "gelu"},
        {"q_lora_rank": None},
    ],
    "DeepseekV3ForCausalLM": [
        {"norm_topk_prob": False},
        {"attention_bias": True},
        {"n_group": 4, "topk_group": 2},
    ],
    "Gemma2ForCausalLM": [
        {"query_pre_attn_scalar": 200},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"hidden_activation": "silu"},
        {"attention_bias": True},
        {"layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]},
    ],
    "Gemma3ForCausalLM": [
        {"query_pre_attn_scalar": 200},
        {"final_logit_softcapping": 2.0},
        {"layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]},
        {"sliding_window": 4},
        {"hidden_activation": "silu"},
    ],
    "Phi3ForCausalLM": [
        rope(partial_rotary_factor=0.5),
        {"sliding_window": 4},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.5},
    ],
    "Olmo3ForCausalLM": [
        rope("yarn", **_YARN),
    ],
}


class Row(NamedTuple):
    """What became of one config.

    `outcome`: equal, refused (with a reason of ours), differs, or failed (with another error).
    """

    name: str
    change: str
    outcome: str
    shows: (
        float | None
        # how far the change moves transformers' own logits, relative; None: the default config has
        # other weights
    )
    figure: float | None = None  # the worst row or log-probability, in its tolerance
    why: str = ""

    @property
    def right(self) -> bool:
        return self.outcome in ("equal", "refused")


def cases(names: Sequence[str] = ()) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, change) for name in names or CHANGES for change in CHANGES[name]]


def label(change: Mapping[str, Any]) -> str:
    """As a config has it; of rotary positions what is not usual."""
    text = ", ".join(
        f"{name}: {json.dumps(value)}"
        for name, value in change.items()
        if name != "rope_parameters"
    )
    rope = ", ".join(
        f"{name}: {json.dumps(value)}" for name, value in change.get("rope_parameters", {}).items()
    )
    return text or f"rope_parameters: {{{rope}}}"


def attempt(name: str, change: Mapping[str, Any], folder: Path, nursery: Nursery) -> Row:
    """Start an engine on a config with this change, and compare what it serves."""
    path = configs.checkpoint(name, folder / "checkpoint", **copy.deepcopy(dict(change)))
    shows = _shown(path, name, folder / "default")
    row = Row(name, label(change), "failed", shows)
    options = options_of(Way("v1", "eager", "float32")) | {"engine.block_size": 32, "certify": True}
    try:
        host = nursery.host(folder / "engine", path, None, **options)
    except AssertionError:
        raised = _RAISED.findall((folder / "engine" / "engine.log").read_text(errors="replace"))
        kind, why = raised[-1] if raised else ("", "the engine ended without an error")
        return row._replace(
            outcome="refused" if kind.startswith("midstream.") else "failed", why=why
        )
    try:
        figure = _figure(host, Reference(path))
    finally:
        host.close()
    return row._replace(
        outcome="equal" if figure <= 1 else "differs", figure=float(f"{figure:.2g}")
    )


def _figure(host: Host, truth: Reference) -> float:
    """The worst error in its tolerance: of all rows, relative to their norm, and of the best
    log-probabilities.
    """
    hooks = [hook for hook in truth.hooks if hook in host.info["hooks"]]
    capture = StoredCapture(sites={hook: ALL for hook in hooks}, positions="all", tag="rows")
    job = host.job(prompt_of(PROMPT, seed=1), max_tokens=4, capture=capture, logprobs=5)
    outputs = host.run(job)[job.id]
    reader = host.capture(job)
    tokens = reader.token_ids()
    rows = truth.rows(tokens)
    worst = 0.0
    for hook in hooks:
        for layer in ALL:
            right = rows[hook, layer]
            errors = np.linalg.norm(reader.array(layer, hook) - right, axis=-1) / np.linalg.norm(
                right, axis=-1
            )
            worst = max(worst, float(np.nan_to_num(errors, nan=np.inf).max()) / FP32_HOOKS)
    scores = torch.from_numpy(truth.logits).log_softmax(-1)[PROMPT - 1 :]
    for place, step in enumerate(outputs[0].logprobs or []):
        for token, logprob in ((each.token_id, each.logprob) for each in (step, *step.top)):
            worst = max(worst, abs(float(scores[place, token]) - logprob) / FP32_LOGPROBS)
    return worst


def _shown(path: Path, name: str, folder: Path) -> float | None:
    """How far the change moves transformers' logits: against the same weights with the default
    config.
    """
    shutil.copytree(path, folder)
    configs.tiny_config(name).save_pretrained(folder)
    try:
        one = Reference(path)
        other = Reference(folder)
        if one._model.state_dict().keys() != other._model.state_dict().keys():
            return None
        for model in (one, other):
            model.rows(prompt_of(PROMPT, seed=1))
    except (
        Exception
    ) as error:  # only the figure of the page is missing then: the row itself is judged elsewhere
        print(f"{name}: transformers' difference is not known: {type(error).__name__}: {error}")
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return float(f"{np.linalg.norm(one.logits - other.logits) / np.linalg.norm(other.logits):.2g}")


# -- the page --------------------------------------------------------------------------------------


def read_page(text: str) -> dict[tuple[str, str], str]:
    """Class and change → its line."""
    lines = [
        line
        for line in text[text.index(BEGIN) : text.index(END)].splitlines()
        if line.startswith("| `")
    ]
    return {
        (cells[1].strip(" `"), cells[2].strip(" `")): line
        for line in lines
        if (cells := line.split("|"))
    }


def line(row: Row) -> str:
    what = {"equal": "equal", "refused": "refused: "}.get(row.outcome, f"**{row.outcome}** ")
    why = (
        re.sub(r"^model: |^\w+: ", "", row.why)[:160].replace("|", "\\|")
        if row.outcome != "equal"
        else ""
    )
    shows = "" if row.shows is None else f"{row.shows:.1e}"
    return f"| `{row.name}` | `{row.change}` | {shows} | {what}{why} |"


def write_page(text: str, table: Mapping[tuple[str, str], str]) -> str:
    order = [(name, label(change)) for name, change in cases()]
    lines = [table[key] for key in order if key in table]
    equal = len([each for each in lines if each.endswith("| equal |")])
    tried = f"{len(lines)} changes in {len({key[0] for key in table})} classes"
    head = (
        f"{tried}: {equal} are served with transformers' numbers, {len(lines) - equal} are refused."
    )
    rows = [
        head,
        "",
        "| class | change | moves transformers' logits by | |",
        "|---|---|---|---|",
        *lines,
    ]
    return (
        f"{text[: text.index(BEGIN) + len(BEGIN)]}\n\n"
        + "\n".join(rows)
        + f"\n\n{text[text.index(END) :]}"
    )


def _lane(waiting: Any, done: Any, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    nursery = nursery_for("v1", folder / "nursery")
    number = 0
    while (case := waiting.get()) is not None:
        number += 1
        started = time.monotonic()
        try:
            row = attempt(*case, folder / str(number), nursery)
        except Exception as error:
            row = Row(
                case[0],
                label(case[1]),
                "failed",
                None,
                why=f"{type(error).__name__}: {error}"[-300:],
            )
        shutil.rmtree(folder / str(number), ignore_errors=True)
        done.put((row, time.monotonic() - started))
    nursery.close()
    done.put(None)


def main(names: Sequence[str]) -> None:
    processes = multiprocessing.get_context("fork")
    waiting = processes.Queue()
    done = processes.Queue()
    for case in [*cases(names), *[None] * LANES]:
        waiting.put(case)
    table = read_page(PAGE.read_text()) if names else {}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        lanes = [
            processes.Process(target=_lane, args=(waiting, done, Path(folder) / str(number)))
            for number in range(LANES)
        ]
        for lane in lanes:
            lane.start()
        ended = 0
        while ended < LANES:
            if (found := done.get()) is None:
                ended += 1
                continue
            row, seconds = found
            table[row.name, row.change] = line(row)
            wrong += [] if row.right else [row]
            PAGE.write_text(write_page(PAGE.read_text(), table))
            print(
                (
                    f"{row.name} {row.change}: {row.outcome} {row.figure} shows {row.shows} "
                    f"{row.why[:300]} {seconds:.0f} s"
                ),
                flush=True,
            )
    if wrong:
        sys.exit("neither equal nor refused:\n" + "\n".join(map(str, wrong)))


if __name__ == "__main__":
    main(sys.argv[1:])
