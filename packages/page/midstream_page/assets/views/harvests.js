// Harvests: a list with progress, one in detail, and a form that starts one from lines of text.

import { del, post } from "../lib/api.js";
import { Button, Copy, Problem, Progress, byStart, html, useEffect, useForm, useState, Coded } from "../lib/ui.js";
import { EmptyState, Id, State, Stats, Table, shortId } from "../lib/parts.js";
import { age, bytes, count, duration, number, percent, time } from "../lib/format.js";
import { useModels, usePolled } from "../lib/ask.js";
import Survey, { Surveys } from "./survey.js";

const OVER = new Set(["succeeded", "failed", "cancelled"]);
const LOOK_S = 2; // between two looks while one is under way
const LIMIT = 100;

/** With the counts that the API leaves out while they are 0. */
const counted = (harvest) => ({
  units: 0,
  units_done: 0,
  documents: 0,
  tokens: 0,
  rows: 0,
  bytes: 0,
  shards: 0,
  share: 0,
  jobs: [],
  ...harvest,
});

const Share = ({ harvest: { share, left_s, state } }) => html`
  <${Progress}
    value=${share}
    total=${1}
    label=${`${percent(share)}${left_s && !OVER.has(state) ? `, ${duration(left_s)} left` : ""}`}
  />
`;

const controlOf = byStart({
  source: "lines",
  layers: "layers",
  hook: "layers",
  max_tokens: "max_tokens",
  model: "model",
});

/** Starts a harvest of lines of text. */
function Form({ open }) {
  const { form, setForm, error, setError, entry } = useForm(
    { model: "", lines: "", layers: "", max_tokens: "" },
    controlOf,
  );
  const models = useModels(setError);
  useEffect(() => {
    const [first] = models || [];
    if (first)
      setForm((known) => ({ ...known, model: first.id, layers: `${Math.floor(first.num_layers / 2)}` }));
  }, [models]);
  const lines = form.lines
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
  const send = async () => {
    setError(null);
    const { id } = await post("/v1/harvests", {
      model: form.model,
      source: { lines },
      layers: form.layers.trim(),
      ...(form.max_tokens ? { max_tokens: Number(form.max_tokens) } : {}),
      shards: { mib: 4 },
    });
    location.hash = `#/harvests/${id}`;
  };
  return html`
    <details class="card new-harvest" open=${open}>
      <summary>New harvest</summary>
      <form onSubmit=${(event) => event.preventDefault()}>
        ${entry("lines", "Documents", {
          hint:
            "One a line, at most 4,096. " +
            "Larger corpora: a file below harvest_sources, with midstream harvest SOURCE.",
          rows: 5,
        })}
        <div class="fields">
          ${models && models.length > 1 && entry("model", "Model", { options: models.map(({ id }) => id) })}
          ${entry("layers", "Layers", { hint: "all, 3, 0-5 or 0-5,-1", maxlength: 1024 })}
          ${entry("max_tokens", "At most tokens", {
            hint: "of all documents; empty: no limit",
            type: "number",
            min: 1,
          })}
        </div>
        <${Problem} error=${error} />
        <${Button}
          kind="main"
          disabled=${!form.model || !lines.length || !form.layers.trim()}
          onClick=${send}
          onError=${setError}
        >
          Harvest ${lines.length ? count(lines.length, "document") : ""}
        <//>
      </form>
    </details>
  `;
}

function List() {
  const [page, , error] = usePolled(`/v1/harvests?limit=${LIMIT}`, LOOK_S, ({ harvests }) =>
    harvests.some(({ state }) => !OVER.has(state)),
  );
  return html`
    <h1>Harvests</h1>
    <p class="lead">
      Run a corpus through a model and keep the rows of some layers as files, each row exactly once: what
      autoencoders and probes are trained on.
    </p>
    ${page && html`<${Form} open=${!page.harvests.length} />`}
    <${Problem} error=${error} />
    ${
      page &&
      !page.harvests.length &&
      html`
        <${EmptyState}
          title="No harvests yet"
          text="Paste some documents above. For a file, use midstream harvest."
        />
      `
    }
    ${
      page &&
      page.harvests.length > 0 &&
      html`
        <${Table}
          label="Harvests"
          spare=${["Model"]}
          heads=${["Harvest", "State", "Progress", "Documents", "Rows", "Size", "Model", "Started"]}
          keys=${page.harvests.map(({ id }) => id)}
          rows=${page.harvests.map(counted).map((harvest) => [
            html`
              <a href=${`#/harvests/${harvest.id}`}>
                ${(harvest.metadata && harvest.metadata.name) || shortId(harvest.id)}
              </a>
            `,
            html`<${State} state=${harvest.state} />`,
            html`<${Share} harvest=${harvest} />`,
            number(harvest.documents),
            number(harvest.rows),
            bytes(harvest.bytes),
            harvest.model,
            `${age(harvest.created)} ago`,
          ])}
        />
      `
    }
  `;
}

function One({ id }) {
  const [failed, setFailed] = useState(null); // of a button
  const path = `/v1/harvests/${encodeURIComponent(id)}`;
  const [answer, look, error] = usePolled(path, LOOK_S, ({ state }) => !OVER.has(state));
  const act = (verb) => async () => {
    setFailed(null);
    await post(`${path}/${verb}`);
    await look();
  };
  const remove = async () => {
    if (!confirm("Delete this harvest and its files?")) return;
    await del(path);
    location.hash = "#/harvests";
  };
  const button = (verb, text, kind = "") =>
    html`<${Button} kind=${kind} onClick=${act(verb)} onError=${setFailed}>${text}<//>`;
  const harvest = answer && counted(answer);
  const { state } = harvest || {};
  return html`
    <h1>Harvest</h1>
    <p><a href="#/harvests">All harvests</a> · ${harvest && `${harvest.model} · `}<${Id} id=${id} /></p>
    <${Problem} error=${error || failed} />
    ${
      harvest &&
      html`
        <p class="inline steady">
          <${State} state=${state} /> <${Share} harvest=${harvest} />
          ${(state === "running" || state === "planning") && button("pause", "Pause")}
          ${state === "paused" && button("resume", "Resume", "main")}
          ${!OVER.has(state) && state !== "sealing" && button("cancel", "Cancel", "danger")}
          ${
            OVER.has(state) &&
            html`<${Button} kind="danger" onClick=${remove} onError=${setFailed}>Delete<//>`
          }
        </p>
        ${harvest.reason && html`<p class="note" role="status"><${Coded} text=${harvest.reason} /></p>`}
        ${harvest.error && html`<${Problem} error=${harvest.error.detail} />`}
        <${Stats}
          items=${[
            {
              name: "Documents",
              value: number(harvest.documents),
              note: `${number(harvest.units_done)} of ${count(harvest.units, "unit")}`,
            },
            { name: "Rows", value: number(harvest.rows) },
            {
              name: "Tokens",
              value: number(harvest.tokens),
              note: harvest.tokens_s ? `${number(harvest.tokens_s)} tokens/s` : null,
            },
            { name: "Files", value: count(harvest.shards, "shard"), note: bytes(harvest.bytes) },
            {
              name: "Time",
              value: duration((harvest.finished || Date.now() / 1000) - (harvest.started || harvest.created)),
              note: time(harvest.created),
            },
          ]}
        />
        <h2>Files</h2>
        <p class="mono uri">${harvest.uri}</p>
        ${
          state === "succeeded"
            ? html`
                <${Copy}
                  label="Read it"
                  tabs=${{
                    Python: [
                      "import midstream",
                      "",
                      `harvest = midstream.harvest.open(${JSON.stringify(harvest.uri)})`,
                      "print(len(harvest), harvest.sites)",
                      "hook, layer = harvest.sites[0]",
                      "rows = harvest.rows(slice(0, 100), layer=layer)",
                      "",
                    ].join("\n"),
                    CLI: `midstream check harvest ${harvest.uri}\n`,
                  }}
                />
              `
            : html`<p class="soft">The folder is complete once it has a <code>manifest.json</code>.</p>`
        }
        ${state === "succeeded" && html`<${Surveys} harvest=${harvest} look=${look} />`}
        ${
          harvest.jobs.length > 0 &&
          html`
            <p class="soft">
              ${count(harvest.jobs.length, "job")}: ${harvest.jobs
                .slice(0, 8)
                .map((job) => html`<a class="mono" href=${`#/jobs/${job}`}>${job}</a> `)}
            </p>
          `
        }
      `
    }
  `;
}

export default function View({ params }) {
  if (params[1]) return html`<${Survey} key=${params[1]} harvest=${params[0]} job=${params[1]} />`;
  return params[0] ? html`<${One} key=${params[0]} id=${params[0]} />` : html`<${List} />`;
}
