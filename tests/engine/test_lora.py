"""Rows under a LoRA adapter are the rows of transformers with the adapter merged into its weights.

Real vLLM, fp32.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx2
import numpy as np
import peft_rows
import pytest
from adapters import LLAMA, TARGETS, make_adapter, merged
from fidelity import Truth
from fidelity_page import hooks_of
from host import Host, capture_of, prompt_of, relative_error
from nursery import Nursery
from reference import Edit, Reference
from refusal_kit import refuses
from stack import Stack
from tiny import CHECKPOINTS, HIDDEN, LAYERS, checkpoint
from tolerances import BF16_EXCESS, FP32_HOOKS, FP32_LOGPROBS, FP32_ROWS

from midstream.client import Client
from midstream.schemas.artifacts.loras import StoredLora
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import StoredSteering
from midstream.storage.formats import lora_files

ALL = list(range(LAYERS))
VECTOR = np.random.default_rng(0).normal(size=HIDDEN).astype(np.float32)
EDITS = [Edit(1, VECTOR, hook="mlp_out"), Edit(2, VECTOR, hook="attn_out")]
#: Those that take adapters; other tests use Llama. Each has something of its own: see the test.
SERVED = sorted(CHECKPOINTS.keys() - {"gpt2", "llama", "mixtral", "qwen3-moe"})
SHORT = {"opt", "gpt-neox"}


class Adapted(NamedTuple):
    """An engine with adapters; name of an adapter (`""`: none) → what transformers computes with
    it.
    """

    host: Host
    root: Path
    loras: dict[str, StoredLora | None]
    truth: dict[str, Reference]
    hooks: list[str]


def adapted(
    nursery: Nursery | None, folder: Path, name: str, env: dict[str, str] | None = None, **settings
) -> Adapted:
    """`nursery`: None for an engine of several ranks, which has processes of its own."""
    base = checkpoint(name, folder / name)
    root = folder / "loras"
    targets = TARGETS.get(name, LLAMA)
    loras: dict[str, StoredLora | None] = {"": None}
    loras["one"] = make_adapter(root, "one", base, targets)
    loras["two"] = make_adapter(root, "two", base, targets[1:4], rank=4, alpha=3.0, use_rslora=True)
    truth = {"": Reference(base)} | {
        each: Reference(merged(base, root / each, folder / f"{each}-merged"))
        for each in ("one", "two")
    }
    options = {
        "artifacts_dir": str(folder),
        "engine.max_loras": 2,
        "engine.max_cpu_loras": 2,
        "engine.max_lora_rank": 16,
        **settings,
    }
    if nursery is not None:
        return Adapted(
            nursery.host(folder / "engine", base, env, **options),
            root,
            loras,
            truth,
            hooks_of(name),
        )
    (folder / "engine").mkdir()
    return Adapted(
        Host(folder / "engine", base, env, **options), root, loras, truth, hooks_of(name)
    )


@pytest.fixture(scope="module")
def llama_loras(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    engine = adapted(
        nursery,
        tmp_path_factory.mktemp("llama-loras"),
        "llama",
        **{"engine.max_num_batched_tokens": 64},
        fault="rpc",
    )
    yield engine
    engine.host.close()


def worst(engine: Adapted, name: str, job, outputs, edits=()) -> float:
    """The largest error of a row of the job's capture, against transformers with this adapter."""
    reader = engine.host.capture(job)
    errors = []
    for output in outputs:
        tokens = job.prompts[output.index].token_ids + (output.token_ids or [0])
        wanted = engine.truth[name].rows(tokens[:-1], edits)
        positions = reader.positions(output.index)
        for hook, layers in job.captures[output.index][0].sites.items():
            errors += [
                relative_error(
                    reader.array(layer, hook, request=output.index), wanted[hook, layer][positions]
                )
                for layer in layers
            ]
    return max(errors)


def everything(engine: Adapted, positions="all"):
    return capture_of([], positions, sites={hook: ALL for hook in engine.hooks})


def plain_and_edited(engine: Adapted, tokens: int) -> dict[tuple[str, bool], Job]:
    """The same prompt with each adapter and without one, with edits and without."""
    return {
        (name, edited): engine.host.job(
            prompt_of(tokens),
            max_tokens=3,
            capture=everything(engine),
            steering=engine.host.steering(*EDITS) if edited else None,
            lora=engine.loras[name],
        )
        for name in ("one", "", "two")
        for edited in (False, True)
    }


def require_right_rows(engine: Adapted, jobs: Mapping[tuple[str, bool], Job], answers) -> None:
    errors = {
        (name, edited): worst(engine, name, job, answers[job.id], EDITS if edited else ())
        for (name, edited), job in jobs.items()
    }
    assert {place: error for place, error in errors.items() if error > FP32_HOOKS} == {}


def test_rows_of_mixed_batches_are_those_of_each_requests_own_adapter(llama_loras: Adapted) -> None:
    """Two adapters and the model alone in the same steps, prefilled in chunks, with edits and
    without.
    """
    jobs = plain_and_edited(llama_loras, 70)
    answers = llama_loras.host.run_together(*jobs.values())
    require_right_rows(llama_loras, jobs, answers)
    changed = jobs["one", False]
    assert worst(llama_loras, "", changed, answers[changed.id]) > 0.05, "the adapter changes rows"


def test_requests_without_tokens_have_the_rows_of_their_adapters(llama_loras: Adapted) -> None:
    host = llama_loras.host
    jobs = {
        name: host.job(
            prompt_of(50, seed=70), max_tokens=0, capture=capture_of([0, 1], "all"), lora=lora
        )
        for name, lora in llama_loras.loras.items()
    }
    before = host.call("midstream_status")[0]["skipped_rows"]
    outputs = host.run(*jobs.values())
    for name, job in jobs.items():
        assert worst(llama_loras, name, job, outputs[job.id]) <= FP32_ROWS
    assert host.call("midstream_status")[0]["skipped_rows"] - before == 3 * 50 * (LAYERS - 2)


@pytest.mark.long
def test_the_model_alone_is_served_bit_for_bit_as_without_adapters(
    llama_loras: Adapted, v1: Host
) -> None:
    """Also in one batch with adapters, where vLLM's own code for CPUs applies the last one to
    everybody.
    """
    prompt = prompt_of(40)
    rows = []
    for host, others in ((v1, []), (llama_loras.host, []), (llama_loras.host, ["one", "two"])):
        job = host.job(prompt, max_tokens=1, capture=everything(llama_loras))
        host.run_together(
            job,
            *(
                host.job(prompt_of(8, seed=9), max_tokens=1, lora=llama_loras.loras[name])
                for name in others
            ),
        )
        rows.append(
            {
                (hook, layer): host.capture(job).array(layer, hook)
                for hook in llama_loras.hooks
                for layer in ALL
            }
        )
    for place, wanted in rows[0].items():
        assert np.array_equal(rows[1][place], wanted), place
        assert relative_error(rows[2][place], wanted) <= FP32_HOOKS, place


def test_cached_prompts_and_kept_rows_belong_to_one_adapter(llama_loras: Adapted) -> None:
    """The same prompt again and again: blocks and rows are reused under the same adapter and no
    other.
    """
    prompt = prompt_of(300, seed=5)
    met = set()
    for name in ("one", "", "two", "one", "two", ""):
        job = llama_loras.host.job(
            prompt, max_tokens=2, capture=everything(llama_loras), lora=llama_loras.loras[name]
        )
        outputs = llama_loras.host.run(job)[job.id]
        assert outputs[0].cached_tokens == (256 if name in met else 0), (name, met)
        assert worst(llama_loras, name, job, outputs) <= FP32_HOOKS, name
        met.add(name)


def test_source_runs_patch_across_adapters(llama_loras: Adapted) -> None:
    """A row captured under one adapter, written into a request under another."""
    host = llama_loras.host
    prompt = prompt_of(20)
    source = host.job(
        prompt, max_tokens=1, capture=capture_of([2], "all_prompt"), lora=llama_loras.loras["one"]
    )
    host.run(source)
    key = host.keep(source)
    row = llama_loras.truth["one"].rows(prompt)["post_block", 2][7]
    patch = StoredSteering(
        layers=[2],
        hook="post_block",
        positions=[5],
        family="replace",
        tensors=[row_name(RunRow(key, "post_block", 2, 7))],
        numbers=[1.0],
    )
    job = host.job(
        prompt,
        max_tokens=1,
        capture=capture_of([2, 3], "all_prompt"),
        steering=[patch],
        lora=llama_loras.loras["two"],
    )
    host.run(job)
    wanted = llama_loras.truth["two"].rows(prompt, [Edit(2, row, [5], op="replace")])
    assert relative_error(host.capture(job).array(3), wanted["post_block", 3]) <= FP32_HOOKS
    plain = llama_loras.truth["two"].rows(prompt)
    assert relative_error(wanted["post_block", 3][5:6], plain["post_block", 3][5:6]) > 0.05


@pytest.mark.long
def test_rows_are_those_of_pefts_own_forward(nursery: Nursery, tmp_path: Path) -> None:
    """Of every adapter that PEFT wrote and that is served."""
    base = checkpoint("llama", tmp_path / "llama")
    golden = np.load(peft_rows.ROWS)
    (tmp_path / "loras").symlink_to(peft_rows.ADAPTERS)
    contents = {name: lora_files.read(peft_rows.ADAPTERS / name) for name in golden}
    with closing(
        nursery.host(
            tmp_path / "engine",
            base,
            artifacts_dir=str(tmp_path),
            **{"engine.max_loras": 3, "engine.max_lora_rank": 8},
        )
    ) as host:
        jobs = {
            name: host.job(
                peft_rows.PROMPT,
                max_tokens=1,
                capture=capture_of([LAYERS - 1], "all"),
                lora=StoredLora(name=name, digest=content.digest, path=name, bytes=content.bytes),
            )
            for name, content in contents.items()
        }
        host.run(*jobs.values())
        errors = {
            name: relative_error(host.capture(job).array(LAYERS - 1), golden[name])
            for name, job in jobs.items()
        }
    assert max(errors.values()) <= FP32_HOOKS, errors


@pytest.mark.long
def test_more_adapters_than_fit_take_turns_and_each_comes_back(llama_loras: Adapted) -> None:
    """Three at once where ranks hold two: the third waits for room, and one that was evicted is
    loaded again.
    """
    base = llama_loras.root.parent / "llama"
    host = llama_loras.host
    more = {
        f"more{number}": make_adapter(llama_loras.root, f"more{number}", base, LLAMA[:1], rank=2)
        for number in range(3)
    }
    loras = llama_loras.loras | more
    for _ in range(2):
        jobs = {
            name: host.job(
                prompt_of(10), max_tokens=3, capture=everything(llama_loras), lora=loras[name]
            )
            for name in ("one", *more)
        }
        answers = host.run(*jobs.values())
        assert worst(llama_loras, "one", jobs["one"], answers[jobs["one"].id]) <= FP32_HOOKS
        assert worst(llama_loras, "one", jobs["more1"], answers[jobs["more1"].id]) > 0.05


def test_files_that_changed_since_registration_are_never_loaded(llama_loras: Adapted) -> None:
    """The engine goes on, and the same name with its new digest is another adapter."""
    base = llama_loras.root.parent / "llama"
    host = llama_loras.host
    former = make_adapter(llama_loras.root, "changing", base, LLAMA, alpha=8.0)
    now = make_adapter(llama_loras.root, "changing", base, LLAMA, alpha=80.0)
    job = host.job(prompt_of(10), max_tokens=2, lora=former)
    (error,) = host.run_any(job).errors.values()
    assert "its files have changed since it was registered" in error
    truth = Reference(
        merged(base, llama_loras.root / "changing", llama_loras.root.parent / "changing-merged")
    )
    job = host.job(prompt_of(10), max_tokens=1, capture=capture_of(ALL, "all"), lora=now)
    host.run(job)
    assert (
        relative_error(host.capture(job).array(3), truth.rows(prompt_of(10))["post_block", 3])
        <= FP32_HOOKS
    )


def test_an_adapter_is_in_the_ranks_account(llama_loras: Adapted) -> None:
    """Once for each request with one, and not at all for others."""
    host = llama_loras.host
    before = host.call("midstream_status")[0]["actions"]
    jobs = [
        host.job(prompt_of(10), prompt_of(12), max_tokens=3, lora=llama_loras.loras[name])
        for name in ("one", "")
    ]
    host.run(*jobs)
    assert host.call("midstream_status")[0]["actions"] == before + 2
    assert [receipt.status for receipt in host.receipts(jobs[0])] == ["ok", "ok"]


@pytest.mark.long
def test_a_rank_that_computes_with_another_adapter_ends_the_engine(
    nursery: Nursery, tmp_path: Path
) -> None:
    engine = adapted(nursery, tmp_path, "llama", fault="swap_lora")
    with (
        closing(engine.host),
        pytest.raises(
            AssertionError, match=r"were computed with adapter 'another' instead of '[0-9a-f]{12}'"
        ),
    ):
        engine.host.run(engine.host.job(prompt_of(10), max_tokens=2, lora=engine.loras["one"]))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.matrix) for name in SERVED],
)
def test_every_kind_of_layer_is_adapted_as_transformers_would(
    nursery: Nursery, tmp_path: Path, name: str
) -> None:
    """Fused pairs, a hook on a layer that an adapter replaces (OPT), layers packed on disk (Phi-3),
    other names in vLLM (GPT-NeoX).
    """
    engine = adapted(nursery, tmp_path, name)
    with closing(engine.host):
        jobs = plain_and_edited(engine, 20)
        require_right_rows(engine, jobs, engine.host.run_together(*jobs.values()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qwen3-moe", "lora_config with a model of experts is True, valid: False"),
        ("gpt2", "GPT2LMHeadModel does not support LoRA"),
    ],
)
def test_models_that_cannot_be_adapted_are_refused_at_boot(
    nursery: Nursery, tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        nursery.host(
            tmp_path / "engine",
            checkpoint(name, tmp_path / name),
            **{"engine.max_loras": 4, "engine.max_model_len": 128},
        )


@pytest.mark.matrix
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_compute_and_account_for_an_adapter_alike(
    two_ranks, tmp_path: Path, split: str
) -> None:
    """Its matrices are divided as those of the model are; each stage has its own layers."""
    engine = adapted(None, tmp_path, "qwen3", **{f"engine.{split}": 2})
    with closing(engine.host):
        jobs = plain_and_edited(engine, 20)
        require_right_rows(engine, jobs, engine.host.run(*jobs.values()))
        receipts = engine.host.receipts(jobs["one", False])
        assert len(receipts) == 2
        assert (
            split == "pipeline_parallel_size"
            or len({receipt.checksum for receipt in receipts}) == 1
        )
        assert len(engine.host.info["lora"]["modules"]["model.layers.*.self_attn.q_proj"]) == 1, (
            "the stages' layers come together"
        )


@pytest.mark.matrix
def test_the_v2_runner_computes_with_adapters(nurseries, tmp_path: Path) -> None:
    options = {
        "engine.max_num_batched_tokens": 64,
        "engine.max_model_len": 256,
        "engine.max_num_seqs": 8,
    }
    engine = adapted(nurseries("v2"), tmp_path, "llama", runner="v2", **options)
    with closing(engine.host):
        jobs = plain_and_edited(engine, 20)
        require_right_rows(engine, jobs, engine.host.run_together(*jobs.values()))


@pytest.mark.matrix
def test_bf16_rows_under_an_adapter_are_as_close_as_transformers_own(
    nursery: Nursery, tmp_path: Path
) -> None:
    engine = adapted(nursery, tmp_path, "llama", **{"engine.dtype": "bfloat16"})
    with closing(engine.host):
        jobs = plain_and_edited(engine, 40)
        engine.host.run_together(*jobs.values())
        for name in ("one", "", "two"):
            reader = engine.host.capture(jobs[name, False])
            rows = {
                (hook, layer): reader.array(layer, hook) for hook in engine.hooks for layer in ALL
            }
            truth = Truth(tmp_path / (f"{name}-merged" if name else "llama"), "bfloat16")
            errors = truth.errors(rows, reader.token_ids())
            assert {hook: error for hook, error in errors.items() if error > BF16_EXCESS} == {}, (
                name
            )


# --- The whole service, over HTTP -----------------------------------------------------------------


class Served(NamedTuple):
    stack: Stack
    client: Client
    root: Path
    base: Path
    truth: dict[str, Reference]


@pytest.fixture(scope="module")
def served(tiny_stack: Stack, llama: Path) -> Iterator[Served]:
    """Adapters `one` and `two`, registered."""
    base = llama
    root = Path(tiny_stack.settings.artifacts_of("loras"))
    make_adapter(root, "first", base, LLAMA)
    make_adapter(root, "deep/second", base, LLAMA[:2], rank=4)
    make_adapter(root, "large", base, LLAMA, rank=32)
    truth = {"": Reference(base)}
    for name, path in (("one", "first"), ("two", "deep/second")):
        truth[name] = Reference(merged(base, root / path, root.parent / name))
    with Client(tiny_stack.url) as client:
        client.loras.put("one", "first")
        client.loras.put("two", "deep/second", description="attention only")
        yield Served(tiny_stack, client, root, base, truth)


@pytest.mark.long
def test_a_job_names_an_adapter_and_gets_the_rows_of_merged_weights(served: Served) -> None:
    prompt = prompt_of(30)
    capture = {
        "hooks": {"pre_attn": "all", "mlp_out": "all", "post_block": "all"},
        "positions": "all",
    }
    for name in ("one", "two", ""):
        result = served.client.run(
            model="tiny",
            prompts=[prompt],
            sampling={"max_tokens": 3},
            capture=capture,
            **({"lora": name} if name else {}),
        )
        tokens = prompt + result.outputs[0].token_ids
        wanted = served.truth[name].rows(tokens[:-1])
        reader = served.client.capture(result)
        for hook in capture["hooks"]:
            for layer in ALL:
                assert (
                    relative_error(reader.array(layer, hook), wanted[hook, layer]) <= FP32_ROWS
                ), (name, hook, layer)
        lora = served.client.loras.get(name) if name else None
        manifest = httpx2.get(f"{served.stack.url}/v1/captures/{result.id}").json()
        for named in (result.lora, reader.manifest().lora):
            assert (named and (named.name, named.digest)) == (lora and (name, lora.digest))
        assert (manifest["lora"] or {}).get("digest") == (lora and lora.digest)


@pytest.mark.long
def test_what_cannot_be_served_is_refused_when_it_is_registered(served: Served) -> None:
    """Before any request runs; the message says what is valid."""
    for path, says in {
        "large": "r is 32; the worker accepts at most 16 (setting engine.max_lora_rank)",
        "../llama": "is not a path below artifacts_dir/loras",
        "missing": "there is no folder 'missing' in artifacts_dir/loras",
        "deep": "has no adapter_config.json",
        "other-base": "has the shape",
    }.items():
        if path == "other-base":
            make_adapter(
                served.root, path, checkpoint("qwen2", served.root.parent / "qwen2"), LLAMA
            )
        with refuses(kind="invalid_request", field="path") as refused:
            served.client.loras.put("bad", path)
        assert says in refused.value.detail
    assert [lora.name for lora in served.client.loras.list()] == ["one", "two"]


@pytest.mark.long
def test_completions_under_two_adapters_and_none_are_answered_side_by_side(served: Served) -> None:
    prompt = prompt_of(25, seed=3)
    wanted = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    for _ in range(2):  # the second time from the prefix cache
        with ThreadPoolExecutor(3) as pool:
            calls = {
                name: pool.submit(
                    served.client.completion,
                    "tiny",
                    prompt,
                    **wanted,
                    **({"lora": name} if name else {}),
                )
                for name in ("one", "two", "")
            }
        for name, call in calls.items():
            answer = call.result()
            assert (answer.determinism is not None) == bool(name), (
                "an adapter alone is accounted for"
            )
            tokens = prompt + [int(word[1:]) for word in answer.text.split()]
            served.truth[name].rows(tokens)
            assert (
                served.truth[name].logits[len(prompt) - 1 : -1].argmax(-1).tolist()
                == tokens[len(prompt) :]
            ), name


@pytest.mark.long
def test_a_sweep_under_an_adapter_measures_the_merged_model(served: Served) -> None:
    clean = prompt_of(9, seed=1)
    corrupt = prompt_of(9, seed=2)
    answer = [40]
    foil = [41]
    result = served.client.sweep(
        model="tiny",
        lora="one",
        metric="logit_diff",
        hooks=["post_block", "mlp_out"],
        layers="0,2",
        positions=[3, 8],
        pairs=[
            {
                "clean": clean,
                "corrupt": corrupt,
                "answer": answer,
                "foil": foil,
                "alignment": "left",
            }
        ],
    )
    truth = served.truth["one"]
    rows = truth.rows(clean)
    for hook in ("post_block", "mlp_out"):
        for row, layer in enumerate((0, 2)):
            for column, position in enumerate((3, 8)):
                truth.rows(
                    corrupt,
                    [Edit(layer, rows[hook, layer][position], [position], hook=hook, op="replace")],
                )
                wanted = float(truth.logits[-1][40] - truth.logits[-1][41])
                assert abs(result.pairs[0].grids[hook][row][column] - wanted) <= FP32_LOGPROBS, (
                    hook,
                    layer,
                    position,
                )
    assert not result.skipped
