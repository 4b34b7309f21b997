// Modules: everything that is registered under a name, by kind, with details, files and deletion.

import { del } from "../lib/api.js";
import { Button, Problem, html, useRef, useState } from "../lib/ui.js";
import { EmptyState, Section } from "../lib/parts.js";
import { age, bytes, count, identity, number, percent } from "../lib/format.js";
import { ARTIFACTS } from "../lib/kinds.js";
import { short } from "../lib/chips.js";
import { useAnswer, useJobs, useModels } from "../lib/ask.js";

/** `[3, 4, 5, 9]` as `3-5, 9`. */
function ranges(layers) {
  const found = [];
  for (const layer of [...layers].sort((a, b) => a - b)) {
    const last = found[found.length - 1];
    if (last && layer === last[1] + 1) last[1] = layer;
    else found.push([layer, layer]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(", ");
}

function positionsOf(positions) {
  if (typeof positions === "string") return positions;
  const { start, ...others } = positions;
  return start > 0 && !Object.keys(others).length ? `tokens from ${start}` : JSON.stringify(positions);
}
const entry = ({ op, hook, layers, positions, scale, norm_match, rank }) =>
  [
    `${op} at ${hook}, layer${layers.length > 1 ? "s" : ""} ${ranges(layers)}`,
    positionsOf(positions),
    op === "add" || op === "replace"
      ? `scale ${short(scale)}${norm_match ? " × norm" : ""}`
      : rank
        ? `rank ${rank}`
        : "",
  ]
    .filter(Boolean)
    .join(" · ");

const within = (prefix) => (job, name) => Boolean(job.contents && job.contents[`${prefix}/${name}`]);

/**
 * Forms of what is registered, by kind: what a line says (`what`) and what details there are (`facts`).
 * `open`: the view that uses one. Null: it has a view of its own.
 */
const FORMS = {
  policies: null,
  modules: {
    title: "Steering modules",
    open: (name) => ["playground", "module", name],
    file: true,
    empty:
      "Steering vectors and other edits under a name. Make one from two lists of texts in the playground.",
    what: ({ entries }) => {
      const more = count(entries.length - 1, "more entry").replace("entrys", "entries");
      return `${entry(entries[0])}${entries.length > 1 ? ` and ${more}` : ""}`;
    },
    facts: ({ entries, training, bytes: size, digest }) => [
      ...(training
        ? [
            [
              "Learned by",
              html`
                ${training.method}, ${count(training.examples, "example")}: <a
                  href=${`#/jobs/${training.job}`}
                >
                  effect and losses
                </a>
              `,
            ],
          ]
        : []),
      ...entries.slice(0, 50).map((each, n) => [`Entry ${n + 1}`, entry(each)]),
      ["Size", bytes(size)],
      ["Digest", digest],
    ],
  },
  probes: {
    title: "Probes",
    open: (name) => ["probes", "probe", name],
    empty: "Linear probes that score every token.",
    command: "midstream fit probe",
    what: ({ content: { labels, hook, layer }, watch }) =>
      `${labels.join(", ")} at ${hook}, layer ${layer}${watch ? ` · watches all traffic (${watch})` : ""}`,
    facts: ({ content, digest }) => [
      [
        "Thresholds",
        content.labels.map((label, n) => `${label}: ${short(content.thresholds[n])}`).join(", "),
      ],
      ["Aggregation", content.aggregation],
      ["Reads", `${content.at} the edits`],
      ["Digest", digest],
    ],
  },
  saes: {
    title: "Sparse autoencoders",
    open: (name) => ["features", "sae", name],
    empty: "Dictionaries of features, from a folder below artifacts_dir/saes.",
    command: "midstream put sae NAME PATH",
    what: ({ form, hook, layer }) =>
      `${number(form.d_sae)} features of ${hook}, layer ${layer} · ${form.architecture}`,
    facts: ({ form, path, trained_on, bytes: size, digest }) => [
      ["Width of rows", number(form.d_in)],
      ["Trained on", trained_on],
      ["Folder", path],
      ["Size", bytes(size)],
      ["Digest", digest],
    ],
  },
  lenses: {
    title: "Tuned lenses",
    open: (name) => ["lens", "through", name],
    empty: "Maps that make early layers readable, from a folder below artifacts_dir/lenses.",
    command: "midstream put lens NAME PATH",
    what: ({ hook, layers }) => `${hook}, layers ${ranges(layers)}`,
    facts: ({ residual, path, bytes: size, digest }) => [
      ["Maps", residual ? "added to the row" : "replace the row"],
      ["Folder", path],
      ["Size", bytes(size)],
      ["Digest", digest],
    ],
  },
  jacobians: {
    title: "Jacobian lenses",
    open: (name) => ["lens", "through", `^${name}`],
    empty: "Maps from a row to what it makes the model say later. A gradient worker fits one to a corpus.",
    command: "midstream fit jacobian NAME FILE",
    what: ({ layers, fit }) =>
      `layers ${ranges(layers)}${fit ? ` · ${fit.method}, of ${count(fit.prompts, "prompt")}` : ""}`,
    facts: ({ fit, vocabulary, path, bytes: size, digest }) => [
      ["Error", fit && fit.errors.length ? `up to ${percent(Math.max(...fit.errors))}, stated` : ""],
      ["Edits", vocabulary ? "by the direction of a token" : "none: the file has no output matrix"],
      ["Folder", path],
      ["Size", bytes(size)],
      ["Digest", digest],
    ],
  },
  loras: {
    title: "LoRA adapters",
    empty: "Trained changes of linear layers, from a folder below artifacts_dir/loras.",
    command: "midstream put lora NAME PATH",
    what: ({ rank, modules }) => `rank ${rank} · ${count(modules.length, "linear layer")}`,
    facts: ({ modules, path, bytes: size, digest }) => [
      ["Linear layers", modules.join(", ")],
      ["Folder", path],
      ["Size", bytes(size)],
      ["Digest", digest],
    ],
  },
};

/** Where each kind is listed, under which name, whether a job uses one, and whether each tenant has its own. */
const RUNS = {
  title: "Source runs",
  path: "/v1/runs",
  own: true,
  used: (job, name) => Boolean(job.runs && job.runs[name]),
  list: "runs",
  empty: "Captures under a name, whose rows other requests can be patched with.",
  what: ({ state, tag, in_use }) =>
    `${state} · tag ${tag}${in_use ? ` · used by ${count(in_use, "job")}` : ""}`,
  facts: ({ job, bytes: size, detail }) => [
    ["Job", html`<a href=${`#/jobs/${job}`}>${job}</a>`],
    ["Size", bytes(size)],
    ...(detail ? [["Detail", detail]] : []),
  ],
};

const OF_ALL = ["name", "model", "digest", "created", "description", "replaced", "uses"];
const brief = (value) => {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
};

/** The form of a kind of an installed package: its own fields, in brief. */
const plain = (plural, { command, takes }) => ({
  title: plural[0].toUpperCase() + plural.slice(1),
  empty: takes,
  command: `midstream put ${command} NAME`,
  what: ({ digest }) => identity(digest),
  facts: (item) =>
    Object.entries(item)
      .filter(([name]) => !OF_ALL.includes(name))
      .map(([name, value]) => [name, brief(value)])
      .concat([["Digest", item.digest]]),
});

const KINDS = Object.keys({ ...FORMS, ...ARTIFACTS })
  .filter((plural) => FORMS[plural] !== null)
  .map((plural) => {
    const row = ARTIFACTS[plural];
    return {
      ...(FORMS[plural] || plain(plural, row)),
      path: `/v1/artifacts/${plural}`,
      list: plural,
      own: row.of_tenants,
      used: plural === "modules" ? (job, name) => Boolean(job.modules && job.modules[name]) : within(row.short),
    };
  })
  .concat([RUNS]);

function Kind({ kind, model, find, jobs, owner }) {
  const [gone, setGone] = useState([]); // names that were deleted here
  const [error, setError] = useState(null);
  const head = useRef(null);
  const query = `?model=${encodeURIComponent(model)}`;
  const found = useAnswer(kind.path + query, setError);
  const items = found && found[kind.list].filter(({ name }) => !gone.includes(name));
  const remove = async (name) => {
    if (
      !confirm(
        `Delete ${name} from the ${kind.title.toLowerCase()}? Requests that were accepted before keep it.`,
      )
    )
      return;
    setError(null);
    await del(`${kind.path}/${encodeURIComponent(name)}${query}`);
    setGone((known) => [...known, name]);
    head.current.focus(); // its button is gone
  };
  const words = find.text.trim().toLowerCase();
  const uses = (item) => jobs.list.filter((job) => kind.used(job, item.name)).length;
  const shown = (items || [])
    .filter((item) =>
      `${item.name} ${item.description || ""} ${kind.what(item)}`.toLowerCase().includes(words),
    )
    .map((item) => ({ ...item, uses: uses(item) }))
    .sort(ORDERS[find.order]);
  if (words && !shown.length) return null;
  return html`
    <div class="kind" ref=${head} tabindex="-1">
      <${Section}
        title=${kind.title}
        aside=${
          items &&
          html`
            <span>
              <span class="pill">${items.length}</span> <small>
                ${kind.own ? `of ${owner}` : "for all tenants"}
              </small>
            </span>
          `
        }
      >
        <${Problem} error=${error} />
        ${
          items &&
          !items.length &&
          html`<p class="soft">${kind.empty} ${kind.command && html`<code>${kind.command}</code>`}</p>`
        }
        <div class="registered">
          ${shown.map((item) => {
            const [view, field, value] = kind.open ? kind.open(item.name) : [];
            return html`
              <article key=${item.name} class="card" aria-label=${item.name}>
                <h3>${item.name}</h3>
                <p class="inline">
                  ${
                    view &&
                    html`
                      <a
                        class="button small"
                        href=${`#/${view}?${field}=${encodeURIComponent(value)}`}
                        aria-label=${`Use ${item.name}`}
                      >
                        Use
                      </a>
                    `
                  }
                  ${
                    kind.file &&
                    html`
                      <a
                        class="button small"
                        href=${`${kind.path}/${encodeURIComponent(item.name)}/file${query}`}
                        download=${`${item.name}.safetensors`}
                        aria-label=${`Download ${item.name}`}
                      >
                        Download
                      </a>
                    `
                  }
                </p>
                <p>
                  ${item.description && `${item.description} · `}
                  <span class="soft">
                    ${kind.what(item)} · ${age(item.created)} ago · ${
                      item.uses ? `used by ${count(item.uses, "job")}` : "not used lately"
                    }
                  </span>
                </p>
                <details>
                  <summary>Details</summary>
                  <dl class="facts">
                    ${kind
                      .facts(item)
                      .filter(([, text]) => text)
                      .map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}
                  </dl>
                  <${Button}
                    kind="small danger"
                    aria-label=${`Delete ${item.name}`}
                    onClick=${() => remove(item.name)}
                    onError=${setError}
                  >
                    Delete
                  <//>
                </details>
              </article>
            `;
          })}
        </div>
      <//>
    </div>
  `;
}

const ORDERS = {
  name: (a, b) => a.name.localeCompare(b.name),
  newest: (a, b) => b.created - a.created,
  "most used": (a, b) => b.uses - a.uses || b.created - a.created,
};

export default function View({ jobs, session }) {
  const [error, setError] = useState(null);
  const [chosen, choose] = useState(null);
  const [find, setFind] = useState({ text: "", order: "name" });
  useJobs(jobs);
  const models = useModels(setError);
  const model = chosen || (models && models.length ? models[0].id : null);
  return html`
    <h1>Modules</h1>
    <p class="lead">
      What is registered under a name, to be used in requests: edits, probes, autoencoders, lenses, adapters
      and rows.
    </p>
    <${Problem} error=${error} />
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      ${
        models &&
        models.length > 1 &&
        html`
          <label>
            Model <select value=${model} onChange=${({ target }) => choose(target.value)}>
              ${models.map((each) => html`<option value=${each.id}>${each.id}</option>`)}
            </select>
          </label>
        `
      }
      <label>
        Find <input
          type="search"
          placeholder="name, description, hook"
          maxlength="200"
          value=${find.text}
          onInput=${({ target }) => setFind({ ...find, text: target.value })}
        />
      </label>
      <label>
        Sort by <select
          value=${find.order}
          onChange=${({ target }) => setFind({ ...find, order: target.value })}
        >
          ${Object.keys(ORDERS).map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
    </form>
    ${
      models &&
      !models.length &&
      html`<${EmptyState} title="No model is served" text="Start one with midstream up." />`
    }
    ${
      model &&
      KINDS.map(
        (kind) => html`
          <${Kind}
            key=${`${model} ${kind.path}`}
            kind=${kind}
            model=${model}
            find=${find}
            jobs=${jobs}
            owner=${session.tenant}
          />
        `,
      )
    }
  `;
}
