// Start: examples that run with one click, what is running, the latest results, and what serves them.

import { html, useMemo, useState, Button, Problem, Progress, useNow } from "../lib/ui.js";
import { finding } from "../lib/finding.js";
import { SweepGrid } from "../lib/grid.js";
import { post } from "../lib/api.js";
import { age, count, duration } from "../lib/format.js";
import { ours } from "../lib/hooks.js";
import { colour } from "../lib/heatmap.js";
import { askedOf, markOf, outcomeOf, over, placeOf, progressOf, timing, titleOf } from "../lib/jobs.js";
import { useAnswer, useJobs, useModels } from "../lib/ask.js";
import { EmptyState, Section, State } from "../lib/parts.js";
import { EXAMPLE } from "../lib/sweep_request.js";
import { useDark } from "../lib/theme.js";

const RESULTS = 3;
const RUNNING = 6;
const MOST_CELLS = 5000;

/**
 * Cells of the drawing on the sweep's card: share recovered, tokens by layers, as a sweep of a factual
 * prompt looks.
 */
const DRAWING = [
  [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
  [0.7, 0.75, 0.8, 0.75, 0.6, 0.4, 0.2, 0.08, 0, 0, 0, 0],
  [0.95, 1, 0.95, 0.9, 0.75, 0.5, 0.3, 0.15, 0.05, 0, 0, 0],
  [0, 0, 0.05, 0.1, 0.1, 0.05, 0, 0, 0, 0, 0, 0],
  [0, 0, 0, 0, 0.05, 0.08, 0.05, 0, 0, 0, 0, 0],
  [0, 0, 0, 0.05, 0.15, 0.35, 0.6, 0.8, 0.9, 0.97, 1, 1],
];

function Drawing({ of }) {
  const dark = useDark();
  if (of === "sweep")
    return html`
      <svg class="drawing" viewBox="0 0 192 72" aria-hidden="true">
        ${DRAWING.flatMap((row, y) =>
          row.map(
            (share, x) => html`
              <rect
                x=${x * 16 + 0.5}
                y=${y * 12 + 0.5}
                width="15"
                height="11"
                rx="1.5"
                fill=${colour(share, dark)}
              />
            `,
          ),
        )}
      </svg>
    `;
  const bars =
    of === "capture"
      ? [14, 60, 22, 30, 26, 44, 20, 34, 28, 24, 52, 30]
      : [10, 12, 18, 16, 26, 30, 28, 40, 46, 44, 56, 62];
  return html`
    <svg class="drawing" viewBox="0 0 192 72" aria-hidden="true">
      ${bars.map(
        (height, x) => html`
          <rect
            x=${x * 16 + 1}
            y=${70 - height}
            width="13"
            height=${height}
            rx="2"
            fill=${colour(of === "capture" ? height / 62 : (x - 4) / 8, dark)}
          />
        `,
      )}
    </svg>
  `;
}

/**
 * What each card says, the request that it sends (null: it only leads to a view), and the views that
 * it leads to.
 */
const CARDS = [
  {
    name: "sweep",
    title: "Where is the answer stored?",
    act: "Run the example sweep",
    own: "#/sweep",
    text:
      "Patch “The Eiffel Tower …” into “The Colosseum …”, one layer and token at a time, and watch which " +
      "cells bring back “Paris”.",
    path: "/v1/sweeps",
    place: "sweep",
    body: (model) => ({
      ...EXAMPLE,
      model: model.id,
      hooks: EXAMPLE.hooks.filter((hook) => model.hooks.includes(ours(hook))),
    }),
  },
  {
    name: "capture",
    title: "What does each layer see?",
    act: "Run the example capture",
    own: "#/capture",
    text: "Record the residual stream of every token at every layer while the model reads one sentence.",
    path: "/v1/jobs",
    place: "capture",
    body: (model) => ({
      model: model.id,
      prompts: [EXAMPLE.pairs[0].clean],
      sampling: { max_tokens: 0 },
      metadata: { name: "Every layer of one sentence" },
      capture: {
        hooks: { [model.hooks.includes("post_block") ? "post_block" : model.hooks[0]]: "all" },
        positions: "all_prompt",
        tag: "page",
      },
    }),
  },
  {
    name: "playground",
    title: "Steer what it says",
    act: "Open the playground",
    own: "",
    text: "Add a direction while the model writes, next to the same text without it.",
    path: null,
    place: "playground",
  },
];

function Example({ card, model, may }) {
  const [error, setError] = useState(null);
  const start = async () => {
    setError(null);
    const job = await post(card.path, card.body(model));
    location.hash = `#/${card.place}/${job.id}`;
  };
  return html`
    <article class="card example">
      <${Drawing} of=${card.name} />
      <h2>${card.title}</h2>
      <p>${card.text}</p>
      <${Problem} error=${error} />
      <div class="inline">
        ${
          card.path
            ? html`
                <${Button} kind="main" disabled=${!model || !may} onClick=${start} onError=${setError}>
                  ${card.act}
                <//>
              `
            : html`<a class="button" href=${`#/${card.place}`}>${card.act}</a>`
        }
        ${card.own && html`<a href=${card.own}>Use your own prompts</a>`}
      </div>
    </article>
  `;
}

function Running({ jobs, now }) {
  const found = jobs.list.filter((job) => !over(job));
  if (!found.length) return html`<p class="soft">Nothing is running or waiting.</p>`;
  return html`
    <ul class="list card">
      ${found.slice(0, RUNNING).map((job) => {
        const progress = progressOf(job);
        return html`
          <li key=${job.id}>
            <a href=${placeOf(job)}>${titleOf(job)}</a>
            <span>
              <${State} state=${job.state} /> ${
                progress &&
                html`<${Progress} value=${progress[0]} total=${progress[1]} label=${progress[2]} />`
              } <small>${timing(job, now) || `for ${duration(now - job.created)}`}</small>
            </span>
          </li>
        `;
      })}
    </ul>
    ${found.length > RUNNING && html`<p><a href="#/jobs">and ${found.length - RUNNING} more</a></p>`}
  `;
}

/**
 * What a sweep found; how many cells it has, until that is known or where there are too many to look
 * at here.
 */
function Found({ job }) {
  const view = useAnswer(job.cells_expected <= MOST_CELLS && `/v1/sweeps/${job.id}`);
  return (
    useMemo(() => view && finding(new SweepGrid(view), view.result.pairs.length > 1 ? null : 0), [view]) ||
    outcomeOf(job)
  );
}

/** The newest results, one of each title and mark, with how many there are of it. */
function latest(jobs) {
  const found = new Map();
  for (const job of jobs.list) {
    const same = `${titleOf(job)}\n${markOf(job, jobs)}`;
    if (job.state === "succeeded" && (found.has(same) || found.size < RESULTS))
      found.set(same, { job, ...found.get(same), runs: (found.get(same)?.runs ?? 0) + 1 });
  }
  return [...found.values()];
}

function Results({ jobs, now }) {
  const found = latest(jobs);
  if (!found.length) {
    const text =
      "They appear here by their prompt as soon as the first job has ended. " +
      "Start with one of the examples above.";
    return html`<${EmptyState} title="No results yet." text=${text} />`;
  }
  return html`
    <div class="cards">
      ${found.map(
        ({ job, runs }) => html`
          <a key=${job.id} class="card result" href=${placeOf(job)}>
            <small>
              ${markOf(job, jobs)} · ${age(job.created, now)} ago
              ${runs > 1 && ` · ${runs} runs`}
            </small>
            <strong>${titleOf(job)}</strong>
            ${askedOf(job) && html`<small>${askedOf(job)}</small>`}
            <span>${job.kind === "sweep" ? html`<${Found} job=${job} />` : outcomeOf(job)}</span>
          </a>
        `,
      )}
    </div>
  `;
}

function Served({ models, service }) {
  if (!models) return html`<p class="lead">Looking for models …</p>`;
  if (!models.length)
    return html`
      <p class="lead" role="status">
        No model is served yet. One that was just started appears here as soon as it is loaded; otherwise
        start one with <code>midstream up MODEL</code>.
      </p>
    `;
  const [model] = models;
  const workers = (service ? service.models : []).reduce((sum, each) => sum + each.healthy, 0);
  return html`
    <p class="lead">
      <strong>${models.map((each) => each.id).join(", ")}</strong> ${models.length > 1 ? "are" : "is"} ready
      ${models.length > 1 ? "" : `: ${count(model.num_layers, "layer")}, ${model.dtype}`}
      ${service ? `, ${count(workers, "healthy worker")}` : ""}. <a href="#/ops">More</a>
    </p>
  `;
}

export default function View({ session, service, jobs }) {
  const [error, setError] = useState(null);
  useJobs(jobs);
  const models = useModels(setError);
  const now = useNow(1);
  const may = session.scopes.includes("submit") || session.scopes.includes("admin");
  return html`
    <h1>Look inside a model while it runs</h1>
    <${Served} models=${models} service=${service} />
    <${Problem} error=${error} />
    <div class="cards">
      ${CARDS.map(
        (card) => html`<${Example} key=${card.name} card=${card} model=${models && models[0]} may=${may} />`,
      )}
    </div>
    ${!may && html`<p class="soft">Examples need a key with the scope <code>submit</code>.</p>`}
    <${Section} title="Running now"><${Running} jobs=${jobs} now=${now} /><//>
    <${Section} title="Latest results" aside=${html`<a href="#/jobs">All jobs</a>`}>
      ${jobs.loaded ? html`<${Results} jobs=${jobs} now=${now} />` : html`<p class="soft">Loading …</p>`}
    <//>
  `;
}
