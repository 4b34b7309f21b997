// Capture: a form that runs one, and a finished one as tokens × layers, coloured by norm or by cosine
// to a module.

import { del, get, post } from "../lib/api.js";
import { Button, Empty, Problem, byStart, html, useEffect, useForm, useState } from "../lib/ui.js";
import { HookBoxes } from "../lib/hooks.js";
import { titleOf } from "../lib/jobs.js";
import { EmptyState, Table, shortId } from "../lib/parts.js";
import { useJobs, useModels } from "../lib/ask.js";
import { age, bytes, number } from "../lib/format.js";
import { Shown } from "./captured.js";

const POSITIONS = {
  all_prompt: "every prompt token",
  all: "every token, including generated ones",
  last_prompt: "the last prompt token",
};
const PAGE = 20;

const controlOf = byStart({
  prompts: "prompt",
  "capture.hook": "layers",
  "capture.layers": "layers",
  "capture.positions": "positions",
  "capture.tag": "tag",
  "sampling.max_tokens": "max_tokens",
  model: "model",
});

function Form() {
  const { form, setForm, error, setError, entry } = useForm(
    {
      model: "",
      prompt: "The Eiffel Tower is located in the city of",
      hooks: [],
      layers: "all",
      positions: "all_prompt",
      max_tokens: 0,
      tag: "page",
    },
    controlOf,
  );
  const models = useModels(setError);
  useEffect(() => {
    const [first] = models || [];
    if (first)
      setForm((known) => ({
        ...known,
        model: first.id,
        hooks: first.hooks.includes("post_block") ? ["post_block"] : first.hooks.slice(0, 1),
      }));
  }, [models]);
  const model = (models || []).find(({ id }) => id === form.model);
  const send = async () => {
    setError(null);
    const { id } = await post("/v1/jobs", {
      model: form.model,
      prompts: [form.prompt],
      sampling: { max_tokens: Number(form.max_tokens) },
      capture: {
        hooks: Object.fromEntries(form.hooks.map((hook) => [hook, form.layers.trim()])),
        positions: form.positions,
        tag: form.tag.trim(),
      },
    });
    location.hash = `#/capture/${id}`;
  };
  const toggle = (hook, on) =>
    setForm({ ...form, hooks: on ? [...form.hooks, hook] : form.hooks.filter((name) => name !== hook) });
  if (models && !models.length) return html`<${Empty}>No model is served.<//>`;
  return html`
    <form class="capture-form card" onSubmit=${(event) => event.preventDefault()}>
      ${models && entry("model", "Model", { options: models.map(({ id }) => id) })}
      ${entry("prompt", "Prompt", { rows: 3 })}
      <fieldset>
        <legend>Hook points</legend>
        <${HookBoxes}
          hooks=${(model && model.hooks) || []}
          chosen=${(hook) => form.hooks.includes(hook)}
          toggle=${toggle}
        />
      </fieldset>
      <div class="inline">
        ${entry("layers", "Layers", {
          hint: model ? `all, 3, 0-5 or 0-5,-1; the model has ${model.num_layers} layers` : null,
          maxlength: 1024,
        })}
        ${entry("positions", "Positions", { options: POSITIONS })}
        ${entry("max_tokens", "Tokens to generate", { type: "number", min: 0 })}
        ${entry("tag", "Tag", { maxlength: 64 })}
      </div>
      <${Problem} error=${error} />
      <${Button}
        kind="main"
        disabled=${!form.model || !form.prompt || !form.hooks.length}
        onClick=${send}
        onError=${setError}
      >
        Capture
      <//>
    </form>
  `;
}

/** Captures that there are, newest first. */
function Recent({ jobs }) {
  useJobs(jobs);
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const load = async (cursor) => {
    setError(null);
    const found = await get(
      `/v1/captures?limit=${PAGE}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`,
    );
    setPage((known) => ({
      captures: [...(cursor && known ? known.captures : []), ...found.captures],
      next: found.next,
    }));
  };
  useEffect(() => void load(null).catch(setError), []);
  const remove = async (job) => {
    if (!confirm(`Delete the captured rows of ${job}?`)) return;
    await del(`/v1/captures/${job}`);
    setPage((known) => ({ ...known, captures: known.captures.filter((entry) => entry.job !== job) }));
  };
  return html`
    <h2>Captures</h2>
    <${Problem} error=${error} />
    ${
      page &&
      !page.captures.length &&
      html`
        <${EmptyState}
          title="No captures yet."
          text="Press Capture above; the rows appear here, to open, download or delete."
        />
      `
    }
    ${
      page &&
      page.captures.length > 0 &&
      html`
        <${Table}
          label="Captures"
          heads=${["Prompt", "Tags", "Age", "Status", "Rows", "Size", ""]}
          keys=${page.captures.map(({ job }) => job)}
          rows=${page.captures.map((entry) => [
            html`
              <a class="two-lines" href=${`#/capture/${entry.job}`} title=${entry.job}>
                ${jobs.byId.has(entry.job) ? titleOf(jobs.byId.get(entry.job)) : shortId(entry.job)}
              </a>
            `,
            entry.tags.join(", "),
            age(entry.created),
            entry.status,
            number(entry.rows),
            bytes(entry.bytes),
            html`
              <${Button}
                kind="small danger"
                aria-label=${`Delete ${entry.job}`}
                onClick=${() => remove(entry.job)}
                onError=${setError}
              >
                Delete
              <//>
            `,
          ])}
        />
      `
    }
    ${
      page &&
      page.next &&
      html`<${Button} onClick=${() => load(page.next)} onError=${setError}>More captures<//>`
    }
  `;
}

export default function View({ params, jobs }) {
  return params[0]
    ? html`<${Shown} key=${params[0]} job=${encodeURIComponent(params[0])} jobs=${jobs} />`
    : html`
        <h1>New capture</h1>
        <p class="lead">
          Record what the model computes at each token: one row per layer, token and hook point.
        </p>
        <${Form} />
        <${Recent} jobs=${jobs} />
      `;
}
