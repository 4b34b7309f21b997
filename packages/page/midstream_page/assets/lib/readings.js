// What the views of readings share: the form that asks for one, its job, the tokens' texts, and jobs
// of before.

import { get, post, whileSeen } from "./api.js";
import { Button, Control, Loading, Problem, faultOf, html, useMemo, useState, useTask, Coded } from "./ui.js";
import { EmptyState, Standing } from "./parts.js";
import { age } from "./format.js";
import { Guide } from "./guides.js";
import { over, titleOf } from "./jobs.js";
import { useAnswer, useJobs, useModels } from "./ask.js";
import { Chips, Legend, brief, visible } from "./chips.js";
import { shade } from "./heatmap.js";

const RECENT = 6;

/** Follows a job to its end: its view, or an ApiError. */
export async function ended(id, { signal = new AbortController().signal, onView = () => {} } = {}) {
  for (let path = `/v1/jobs/${id}`; ; path = `/v1/jobs/${id}?wait=20`) {
    const held = await whileSeen(signal);
    const view = await get(path, { signal: held }).catch((error) => {
      if (signal.aborted || !held.aborted) throw error; // else the page was hidden
    });
    if (view) onView(view);
    if (view && over(view)) return view;
  }
}

/** {view, result, error} of a job: `result`, if it is `wanted`, once it has succeeded. */
export function useJob(id, wanted = true) {
  const [found, set] = useState({});
  useTask(
    (signal) => {
      if (!id) return;
      set({});
      ended(id, { signal, onView: (view) => set({ view }) })
        .then(
          async (view) =>
            wanted &&
            view.state === "succeeded" &&
            set({ view, result: await get(`/v1/jobs/${id}/result`, { signal }) }),
        )
        .catch((error) => signal.aborted || set(({ view }) => ({ view, error })));
    },
    [id],
  );
  return found;
}

/** Token id → its text, of `ids` (null: none yet). */
export function useWords(model, ids) {
  const [words, set] = useState(null);
  useTask(
    (signal) => {
      if (!ids) return;
      const tokens = [...new Set(ids)];
      post("/v1/detokenize", { model, tokens }, { signal }).then(
        ({ token_strs }) => set(new Map(tokens.map((token, n) => [token, token_strs[n]]))),
        () => signal.aborted || set(new Map()), // the model is not served any more: ids
      );
    },
    [model, ids],
  );
  return useMemo(() => words && ((token) => words.get(token) ?? `#${token}`), [words]);
}

/**
 * What a request has in the place of a form's field, as text; undefined: nothing that fits. Token ids,
 * and a chat without a field that says how it is sent, are no prompt for it.
 */
function sentIn(body, { name, api, sent }) {
  if (sent) return sent(body);
  const found = api.split(/\W+/).reduce((value, key) => value && value[key], body);
  const first = [found].flat()[0];
  if (Array.isArray(found) && found.length > 1)
    return name === "prompt" ? first : found.join(typeof first === "string" ? "|" : ",");
  const value = first && typeof first === "object" ? first[name] : first;
  return ["string", "number"].includes(typeof value) ? `${value}` : name === "prompt" ? "" : undefined;
}

/**
 * A form that submits one prompt with a reading and opens `#/name/JOB`. `registered`: where the
 * model's artifacts are listed, if it needs any. `fields(model, found)`: [{name, label, value, hint,
 * options | type, api: beginning of the API's field, sent(body): its value in a request, if it is
 * not what the API's field has}]; `body(values, model)`: what the request has beside model and
 * prompt. `missing(model, found)`: what stands in place of the form; null: nothing is missing.
 * `more(values, found)`: what stands below it; `prompt`: changes to the prompt's field.
 */
export function ReadingForm({
  name,
  action,
  example,
  query,
  registered,
  prompt,
  fields,
  body,
  missing,
  more,
}) {
  const job = location.hash.startsWith(`#/${name}/`)
    ? location.hash.slice(name.length + 3).split("?")[0]
    : "";
  // as typed beside the job `of`
  const [{ of, ...typed }, setForm] = useState({ of: job, ...Object.fromEntries(query) });
  const form = !job || of === job ? typed : {};
  const asked = useAnswer(job && `/v1/jobs/${job}/request`);
  const [error, setError] = useState(null);
  const models = useModels(setError);
  const model =
    models &&
    (models.find(({ id }) => id === (form.model ?? ((asked && asked.body) || {}).model)) || models[0]);
  const found = useAnswer(
    model && registered
      ? [registered].flat().map((path) => `${path}?model=${encodeURIComponent(model.id)}`)
      : null,
    setError,
  );
  if (models && !models.length)
    return html`<${EmptyState} title="No model is served" text="Start one with midstream up." />`;
  if (!model || (registered && !found))
    return html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const lacking = missing(model, found);
  const shown = [
    { name: "prompt", label: "Prompt", api: "prompts", rows: 2, value: example, ...prompt },
    ...(models.length > 1
      ? [
          {
            name: "model",
            label: "Model",
            api: "model",
            value: model.id,
            options: models.map(({ id }) => id),
          },
        ]
      : []),
    ...(lacking ? [] : fields(model, found)),
  ];
  const values = Object.fromEntries(
    shown.map((field) => [
      field.name,
      form[field.name] ??
        (asked && field.name !== "model" ? sentIn(asked.body || {}, field) : null) ??
        field.value,
    ]),
  );
  const at = error && error.field && shown.find(({ api }) => error.field.startsWith(api));
  const send = async () => {
    setError(null);
    const { id } = await post("/v1/jobs", {
      model: model.id,
      prompts: [values.prompt],
      sampling: { max_tokens: 0 },
      metadata: { page: name },
      ...body(values, model),
    });
    setForm({ ...values, of: id });
    location.hash = `#/${name}/${id}`;
  };
  const control = ({ name: field, api, sent, ...rest }) => {
    const change = ({ target }) => setForm({ ...form, of: job, [field]: target.value });
    return html`
      <${Control}
        key=${field}
        maxlength=${rest.rows || rest.options ? null : 1024}
        ...${rest}
        value=${values[field]}
        change=${change}
        error=${at && at.name === field ? faultOf(error) : null}
      />
    `;
  };
  return html`
    <form class="card reading-form" onSubmit=${(event) => event.preventDefault()}>
      ${control(shown[0])}
      <div class="fields">${shown.slice(1).map(control)}</div>
      ${
        lacking ||
        html`
          <${Button} kind="main" disabled=${!values.prompt} onClick=${send} onError=${setError}>${action}<//>
        `
      }
      <${Problem} error=${at ? null : error} />
    </form>
    ${!lacking && more && more(values, found)}
  `;
}

/**
 * A job's answer once it is there: `children(result, view, n)`; of several prompts, `n` is the one
 * that is chosen. Until then, and without an `id`, the newest of the view `name`.
 */
export function Reading({ id, name, jobs, children }) {
  const { view, result, error } = useJob(id && encodeURIComponent(id));
  const [n, choose] = useState(0);
  useJobs(jobs);
  const live = jobs.byId.get(id) || view; // knows at once that the job runs
  const failed = view && over(view) && view.state !== "succeeded";
  return html`
    <${Problem} error=${error} />
    ${
      id &&
      !error &&
      !failed &&
      !result &&
      (live && !over(live) ? html`<${Standing} job=${live} jobs=${jobs} />` : html`<${Loading} />`)
    }
    ${
      failed &&
      html`
        <div class="problem" role="alert">
          The job is ${view.state}
          ${view.error && html`: <${Coded} text=${view.error.detail} />`}.
        </div>
      `
    }
    ${name && !result && html`<${Recent} name=${name} jobs=${jobs} />`}
    ${
      result &&
      html`
        ${
          result.outputs.length > 1 &&
          html`
            <p class="inline">
              <label>
                Prompt <input
                  type="number"
                  min="0"
                  max=${result.outputs.length - 1}
                  value=${n}
                  onChange=${({ target }) =>
                    choose(
                      Math.max(0, Math.min(result.outputs.length - 1, Math.trunc(target.valueAsNumber) || 0)),
                    )}
                />
              </label>
              <span class="soft">of ${result.outputs.length}, from 0</span>
            </p>
          `
        }
        ${children(result, view, n)}
        <p class="soft">From <a href=${`#/jobs/${id}`}>this job</a>, ${age(view.created)} ago.</p>
      `
    }
  `;
}

/** The newest jobs that the page's view `name` submitted. */
function Recent({ name, jobs }) {
  useJobs(jobs);
  const found = [];
  for (const job of jobs.list)
    if (found.length < RECENT && job.metadata && job.metadata.page === name) found.push(job);
  return html`
    <div class="reading even">
      <${Guide} of=${name} />
      <section class="card" aria-label="Recent">
        <h2>Recent</h2>
        ${found.length ? "" : html`<p class="soft">What you read is listed here by its prompt.</p>`}
        <ul class="recent">
          ${found.map(
            (job) => html`
              <li key=${job.id}>
                <a class="two-lines" href=${`#/${name}/${job.id}`}>${titleOf(job)}</a> <span class="soft">
                  ${job.state === "succeeded" ? "" : `${job.state}, `}
                  ${age(job.created)} ago
                </span>
              </li>
            `,
          )}
        </ul>
      </section>
    </div>
  `;
}

/** Bars with text: `items` is [{key, text, value, share, active}]; `onPick(key)` makes them buttons. */
export const Bars = ({ items, label, onPick }) => html`
  <ol class="bars" aria-label=${label}>
    ${items.map(({ key, text, value, share, active }) => {
      const inside = html`
        <span class="bar-text">${text}</span>
        <span class="bar-value">${value}</span>
        <span class="bar"><i style=${{ width: `${Math.max(0, Math.min(1, share)) * 100}%` }}></i></span>
      `;
      return html`
        <li key=${key}>
          ${
            onPick
              ? html`
                  <button
                    type="button"
                    class="bar-row"
                    aria-pressed=${active ? "true" : "false"}
                    onClick=${() => onPick(key)}
                  >
                    ${inside}
                  </button>
                `
              : html`<span class="bar-row">${inside}</span>`
          }
        </li>
      `;
    })}
  </ol>
`;

/** Arrow keys, Home and End move `at` ({row, column}) within `rows` × `columns`. */
export const moving = (at, move, rows, columns) => (event) => {
  const step = {
    ArrowRight: [0, 1],
    ArrowLeft: [0, -1],
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    Home: [0, -Infinity],
    End: [0, Infinity],
  }[event.key];
  if (!step || event.target.closest("input, select, button")) return;
  event.preventDefault();
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  move({ row: within(at.row + step[0], rows), column: within(at.column + step[1], columns) });
};

/** A token in running text. */
export const quoted = (word) => html`<q class="token">${visible(word)}</q>`;

/**
 * `examples` of a survey, strongest first: in which contexts a feature is most active, or two harvests
 * differ most; `what`: the values.
 */
export function Examples({ model, examples, what = "activation" }) {
  const word = useWords(
    model,
    useMemo(() => examples.flatMap(({ token_ids }) => token_ids), [examples]),
  );
  if (!examples.length) return html`<p class="soft">It is active nowhere.</p>`;
  const top = examples[0].value;
  return (
    word &&
    html`
      <${Legend} low=${0} paint=${shade} from=${0} to=${top} what=${what} text=${brief} />
      <ol class="examples">
        ${examples.map(
          ({ document, position, value, positions, token_ids, values }) => html`
            <li key=${document}>
              <p class="soft">
                ${brief(value)} at ${quoted(
                  word(token_ids[positions.indexOf(position)]),
                )}, token ${position} of document ${document}
              </p>
              <${Chips}
                label=${`Document ${document}`}
                paint=${shade}
                text=${brief}
                active=${position}
                items=${positions.map((at, n) => ({
                  key: at,
                  word: word(token_ids[n]),
                  value: values[n],
                  share: values[n] / top,
                }))}
              />
            </li>
          `,
        )}
      </ol>
    `
  );
}
