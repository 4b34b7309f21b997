// The form of a sweep: what the server would run is shown, with both prompts' tokens aligned, before
// anything runs.

import { get, pause, post } from "../lib/api.js";
import {
  Button,
  Control,
  Problem,
  html,
  useCallback,
  useEffect,
  useMemo,
  useRef,
  useState,
  useTask,
  Coded,
} from "../lib/ui.js";
import { useModels } from "../lib/ask.js";
import { count, number } from "../lib/format.js";
import { written } from "../lib/grid.js";
import { HookBoxes, ours } from "../lib/hooks.js";
import { layout, linksOf } from "../lib/align.js";
import { EXAMPLE, TEXTS, blankForm, emptyPair, formOf, lacking, requestOf } from "../lib/sweep_request.js";

/** Seconds without a key before the server is asked. */
const PAUSE_S = 0.3;
const MOST_PAIRS = 256;
const CHOICES = {
  metric: {
    recovered: "recovered (0–1)",
    logit_diff: "logit_diff: log P(answer) − log P(foil)",
    logprob: "logprob: log P(answer)",
    kl: "kl: change of the next-token distribution",
  },
  direction: { denoise: "denoise: patch clean into corrupt", noise: "noise: patch corrupt into clean" },
  ablation: {
    "": "none: patch rows of the other prompt",
    zeros: "zeros (no second prompt)",
    mean: "mean of the prompt's own rows (no second prompt)",
  },
  axis: {
    position: "position: one token per column",
    together: "together: all positions in one column",
    head: "head: one head per column",
    head_position: "head_position: one head at one position per column",
    neuron: "neuron (list them below)",
  },
  method: {
    "": "patching: compute every cell",
    attribution: "attribution: estimate the cells from one gradient",
    integrated: "integrated: from gradients at several points",
    edges: "edges: estimate connections between heads and MLPs",
    adaptive: "adaptive: estimate, then compute the strongest cells",
  },
  verify: { "": "no: estimates only", defaults: "yes: the largest, random and doubtful ones" },
  alignment: {
    auto: "auto: corresponding tokens only",
    left: "left: count from the start",
    right: "right: count from the end",
  },
};
export default function Form({ like }) {
  const [form, setForm] = useState(null);
  const [problem, setProblem] = useState(null);
  const models = useModels((error) => (setProblem(error), setForm((known) => known || blankForm())));
  const [plan, setPlan] = useState({});
  const sent = useRef({});

  useTask(
    (signal) => {
      if (!like) return;
      get(`/v1/sweeps/${encodeURIComponent(like)}`, { signal }).then(
        ({ request }) =>
          request
            ? setForm(formOf(request))
            : setProblem(new Error("the server did not keep the request of this sweep")),
        (error) => signal.aborted || (setProblem(error), setForm(blankForm())),
      );
    },
    [like],
  );
  useEffect(() => {
    if (!models) return;
    const [first] = models;
    const hooks = first && first.hooks.includes("post_block") ? ["post_block"] : [];
    setForm((known) => {
      if (!known) return like ? known : blankForm(first ? first.id : "", hooks);
      return known.model || !first
        ? known
        : { ...known, model: first.id, hooks: known.hooks.length ? known.hooks : hooks };
    });
  }, [models, Boolean(form)]);

  const asked = useMemo(() => (form ? requestOf(form) : {}), [form]);
  const wanting = form ? lacking(asked) : "";
  const body = asked.request && !wanting ? JSON.stringify(asked.request) : "";
  const kind = asked.request && asked.request.method ? "attribution" : "sweep";

  useTask(
    async (signal) => {
      setPlan(({ found }) => (body && found ? { found, stale: true } : {}));
      if (body) await pause(PAUSE_S, signal);
      if (!body || signal.aborted) return;
      try {
        setPlan({ found: await post(`/v1/${kind}s?dry_run=true`, JSON.parse(body), { signal }) });
      } catch (error) {
        if (!signal.aborted) setPlan({ error });
      }
    },
    [body],
  );

  const change = useCallback((name, value) => {
    setProblem(null);
    setForm((known) => ({ ...known, [name]: value }));
  }, []);
  const changePair = useCallback((index, name, value) => {
    setProblem(null);
    setForm((known) => ({
      ...known,
      pairs: known.pairs.map((pair, n) => (n === index ? { ...pair, [name]: value } : pair)),
    }));
  }, []);

  if (!form)
    return html`
      <h1>New sweep</h1>
      <${Problem} error=${problem} />
      ${!problem && html`<p class="loading">Loading the models …</p>`}
    `;

  const error = problem || plan.error;
  const told = { ...asked.errors };
  const place = error && error.field ? controlOf(error.field, form) : null;
  if (place) told[place] = `${error.detail}${error.allowed ? `. Valid: ${error.allowed}` : ""}`;

  const submit = async () => {
    if (!body) return;
    if (sent.current.body !== body)
      sent.current = { body, key: crypto.getRandomValues(new Uint32Array(4)).join("-") };
    const { key } = sent.current; // the same form sent again, after a lost connection too, is the same sweep
    try {
      const job = await post(`/v1/${kind}s`, JSON.parse(body), { headers: { "idempotency-key": key } });
      location.hash = `#/${kind}/${job.id}`;
    } catch (failure) {
      setProblem(failure);
    }
  };
  const model = (models || []).find((each) => each.id === form.model);
  const example = () => {
    setProblem(null);
    const hooks = EXAMPLE.hooks.filter((name) => !model || model.hooks.includes(ours(name)));
    setForm(formOf({ ...EXAMPLE, model: form.model, hooks }));
  };

  return html`
    <div class="section-head"><h1>New sweep</h1><${Button} onClick=${example}>Try an example<//></div>
    <p class="lead">
      Which layer and which token carry the answer? A sweep patches the rows of one prompt into another, one
      cell at a time.
    </p>
    <form
      class="sweep-form"
      noValidate
      onSubmit=${(event) => event.preventDefault()}
      onKeyDown=${(event) =>
        event.key === "Enter" &&
        event.target.tagName === "INPUT" &&
        event.target.type === "text" &&
        document.getElementById("sweep-start").click()}
    >
      ${form.pairs.map(
        (pair, n) => html`
          <${Pair}
            key=${n}
            n=${n}
            pair=${pair}
            many=${form.pairs.length > 1}
            ablation=${form.ablation}
            told=${told}
            change=${changePair}
            remove=${() =>
              change(
                "pairs",
                form.pairs.filter((_, other) => other !== n),
              )}
          />
        `,
      )}
      <p>
        <${Button}
          kind="small"
          disabled=${form.pairs.length >= MOST_PAIRS}
          onClick=${() => change("pairs", [...form.pairs, emptyPair()])}
        >
          Add a pair
        <//>
      </p>
      <fieldset>
        <legend>Grid</legend>
        <div class="fields">
          <${Entry}
            name="model"
            label="Model"
            options=${Object.fromEntries(
              [...(models || []).map(({ id }) => id), form.model].map((name) => [
                name,
                name || "no model is served",
              ]),
            )}
            form=${form}
            told=${told}
            change=${change}
          />
          <${Entry}
            name="layers"
            label="Layers"
            hint="all, 3, 0-5 or 0-5,9,-1"
            form=${form}
            told=${told}
            change=${change}
          />
          <${Entry}
            name="positions"
            label="Positions of the patched prompt"
            hint="all_prompt, last_prompt, 0,5,-1 or 5:9"
            form=${form}
            told=${told}
            change=${change}
          />
          <${Entry} name="metric" label="Metric" form=${form} told=${told} change=${change} />
          <${Entry} name="direction" label="Direction" form=${form} told=${told} change=${change} />
          <${Entry} name="method" label="Method" form=${form} told=${told} change=${change} />
          ${
            form.method &&
            html`
              <${Entry}
                name="verify"
                label="Compute some cells exactly"
                form=${form}
                told=${told}
                change=${change}
              />
            `
          }
          <${Entry}
            name="name"
            label="Name"
            hint="to find it again; optional"
            form=${form}
            told=${told}
            change=${change}
          />
        </div>
      </fieldset>
      <${Hooks}
        model=${model}
        chosen=${form.hooks}
        error=${told.hooks}
        change=${(hooks) => change("hooks", hooks)}
      />
      <details
        open=${Boolean(
          form.more ||
          told.more ||
          ["axis", "alignment", "ablation", "window.layers", "window.positions", "noise"].some(
            (name) => told[name],
          ),
        )}
      >
        <summary>More options</summary>
        <div class="fields">
          <${Entry} name="axis" label="Columns" form=${form} told=${told} change=${change} />
          <${Entry} name="alignment" label="Alignment" form=${form} told=${told} change=${change} />
          <${Entry} name="ablation" label="Ablation" form=${form} told=${told} change=${change} />
          <${Entry}
            name="windowLayers"
            label="Layers patched together"
            told=${{ windowLayers: told["window.layers"] }}
            form=${form}
            change=${change}
          />
          <${Entry}
            name="windowPositions"
            label="Columns patched together"
            told=${{ windowPositions: told["window.positions"] }}
            form=${form}
            change=${change}
          />
          <${Entry}
            name="noise"
            label="No-op patches that measure the noise"
            form=${form}
            told=${told}
            change=${change}
          />
          <${Entry}
            name="more"
            label="Other request fields, as JSON"
            hint="heads, neurons, path, mask, alpha, lora, priority, metadata …"
            form=${form}
            told=${told}
            change=${change}
          />
        </div>
      </details>
      ${error && !place && html`<${Problem} error=${error} />`}
      <${Planned}
        plan=${plan}
        wanting=${wanting || (asked.errors ? "Correct the marked field." : "")}
        request=${asked.request}
        waits=${Boolean(body)}
      >
        <${Button}
          id="sweep-start"
          kind="main"
          disabled=${!body}
          aria-describedby="sweep-planned"
          onClick=${submit}
        >
          Run the sweep
        <//>
      <//>
    </form>
  `;
}

/** The control that shows an error of this field; null: none does. */
function controlOf(field, form) {
  const pair = /^pairs\[(\d+)\]\.?([a-z]*)/.exec(field);
  if (pair && form.pairs[Number(pair[1])])
    return TEXTS.includes(pair[2])
      ? `pairs[${pair[1]}].${pair[2]}`
      : pair[2] === "positions" && !form.pairs[Number(pair[1])].more
        ? "positions"
        : `pairs[${pair[1]}].more`;
  const [name] = field.split(/[.[]/);
  if (
    [
      "model",
      "hooks",
      "layers",
      "positions",
      "axis",
      "metric",
      "direction",
      "ablation",
      "alignment",
      "noise",
      "method",
    ].includes(name)
  )
    return name;
  if (field === "metadata.name") return "name";
  if (name === "window") return field.startsWith("window.positions") ? "window.positions" : "window.layers";
  return [
    "heads",
    "neurons",
    "path",
    "mask",
    "alpha",
    "lora",
    "priority",
    "metadata",
    "expires_in",
    "callback_url",
    "callback_events",
  ].includes(name)
    ? "more"
    : null;
}

/** The control of a field; one of `CHOICES` where it has some. */
const Entry = ({ name, form, told, change, ...rest }) => html`
  <${Control}
    options=${CHOICES[name]}
    error=${told[name]}
    data-field=${name}
    autocomplete="off"
    value=${form[name]}
    change=${({ target }) => change(name, target.value)}
    ...${rest}
  />
`;

const LABELS = { clean: "Clean prompt", corrupt: "Corrupt prompt", answer: "Answer", foil: "Foil" };
const HINTS = {
  clean: "the prompt that the answer completes",
  corrupt: "the same prompt with one difference",
  answer: "completes the clean prompt, usually with a leading space",
  foil: "completes the corrupt prompt; optional",
};

function Pair({ n, pair, many, ablation, told, change, remove }) {
  const control = (name) => {
    const at = `pairs[${n}].${name}`;
    const rows = name === "clean" || name === "corrupt" ? 2 : null;
    return html`
      <${Control}
        label=${LABELS[name]}
        hint=${HINTS[name]}
        error=${told[at]}
        data-field=${at}
        rows=${rows}
        maxlength="1048576"
        spellcheck=${false}
        autocomplete="off"
        disabled=${name === "corrupt" && Boolean(ablation)}
        value=${pair[name]}
        change=${({ target }) => change(n, name, target.value)}
      />
    `;
  };
  return html`
    <fieldset class="pair">
      <legend>${many ? `Pair ${n + 1}` : "Prompts"}</legend>
      <div class="fields wide">${control("clean")}${control("corrupt")}</div>
      <div class="fields">${control("answer")}${control("foil")}</div>
      ${
        (pair.more || told[`pairs[${n}].more`]) &&
        html`
          <${Control}
            label="Other fields of this pair, as JSON"
            hint="spans, positions, alignment, or prompts as token ids"
            error=${told[`pairs[${n}].more`]}
            data-field=${`pairs[${n}].more`}
            value=${pair.more}
            change=${({ target }) => change(n, "more", target.value)}
          />
        `
      }
      ${
        !pair.more &&
        html`<${Button} kind="small" onClick=${() => change(n, "more", "{}")}>Spans and other fields<//> `
      }
      ${many && html`<${Button} kind="small" onClick=${remove}>Remove pair ${n + 1}<//>`}
    </fieldset>
  `;
}

/** Hook points that the model has, by our name; one that the request calls by another name keeps that. */
function Hooks({ model, chosen, error, change }) {
  const named = new Map(chosen.map((name) => [ours(name), name]));
  const served = model ? model.hooks : [];
  const all = [...served, ...[...named.keys()].filter((hook) => !served.includes(hook))];
  const toggle = (hook, on) => change(on ? [...chosen, hook] : chosen.filter((name) => ours(name) !== hook));
  return html`
    <fieldset class="hooks" aria-describedby=${error ? "hooks-error" : null}>
      <legend>Hook points</legend>
      <${HookBoxes}
        hooks=${all}
        chosen=${(hook) => named.has(hook)}
        toggle=${toggle}
        note=${(hook) => (served.includes(hook) || !model ? "" : " (not served)")}
      />
      ${error && html`<small id="hooks-error" class="bad" role="alert">${error}</small>`}
    </fieldset>
  `;
}

/** How large a planned sweep is, in words. */
function sized({ cells, pairs, hooks, layers, skipped, tokens }) {
  const sides = [
    pairs.length > 1 && `${pairs.length} pairs`,
    count(hooks.length, "hook point"),
    count(layers.length, "layer"),
    count(pairs[0].columns.length, "column"),
  ];
  const without = skipped ? `; ${number(skipped)} cannot be patched` : "";
  return `${number(cells)} cells: ${sides.filter(Boolean).join(", ")}${without}. ${number(tokens)} tokens.`;
}

/** What would run, or why nothing can, beside the button that stays in sight. */
function Planned({ plan, wanting, request, waits, children }) {
  const { found, error, stale } = plan;
  const state =
    found && !stale
      ? sized(found)
      : wanting ||
        (error ? "This sweep cannot run as it is; see the error." : waits ? "Aligning the tokens …" : "");
  return html`
    <section
      aria-label="What will run"
      class=${`planned ${stale ? "stale" : ""}`}
      aria-busy=${stale ? "true" : "false"}
    >
      <div>
        ${
          found &&
          found.pairs.slice(0, 8).map(
            (pair, n) => html`
              <${Aligned}
                key=${n}
                pair=${pair}
                patched=${found.patched}
                title=${found.pairs.length > 1 ? `Pair ${n + 1}` : ""}
              />
            `,
          )
        }
        ${found && found.pairs.length > 8 && html`<p>… and ${found.pairs.length - 8} more pairs</p>`}
      </div>
      <div class="run-bar card">
        ${children}
        <p id="sweep-planned" role="status" class=${error ? "bad" : ""}>${state}</p>
      </div>
    </section>
  `;
}

const MOST_SHOWN = 400; // tokens of a pair

function Aligned({ pair, patched, title }) {
  const links = linksOf(pair, patched);
  const columns = layout(pair.clean_tokens.length, pair.corrupt_tokens.length, links);
  const ablated = !pair.corrupt_tokens.length;
  const inGrid = new Set(pair.columns.flatMap((column) => column.positions));
  const whole = pair.columns.length === pair[`${patched}_tokens`].length; // a column for each token
  const reasonOf = (place, token) =>
    (whole ? pair.columns[place] : pair.columns.find((column) => column.label === token) || {}).reason;
  const cell = (which, column) => {
    const place = column[which];
    if (place === null) return html`<td class="gap"></td>`;
    const token = pair[`${which}_tokens`][place];
    const other = column.linked
      ? pair[`${which === "clean" ? "corrupt" : "clean"}_tokens`][
          column[which === "clean" ? "corrupt" : "clean"]
        ]
      : null;
    const is = ablated
      ? inGrid.has(place)
        ? "same"
        : "alone"
      : !column.linked
        ? "alone"
        : other === token
          ? "same"
          : "swapped";
    const why =
      is === "alone"
        ? ablated
          ? "not patched"
          : (which === patched && reasonOf(place, token)) ||
            "not patched: no counterpart, or not among the positions"
        : `${place}`;
    return html`
      <td class=${is} title=${why}>
        ${written(token)}
        ${is === "alone" && html`<span class="visually-hidden"> (not patched)</span>`}
      </td>
    `;
  };
  const rows = ablated ? ["clean"] : ["clean", "corrupt"];
  return html`
    <div
      class="aligned"
      role="region"
      tabindex="0"
      aria-label=${`Tokens of both prompts, aligned${title ? `, ${title}` : ""}`}
    >
      <table>
        <caption>
          ${title && `${title}: `}
          ${
            ablated
              ? "the prompt's tokens"
              : `${links.length} of ${pair[`${patched}_tokens`].length} tokens of the ${patched} prompt are aligned`
          }
        </caption>
        <tbody>
          ${rows.map(
            (which) => html`
              <tr>
                <th scope="row">${which}</th>
                ${columns.slice(0, MOST_SHOWN).map((column) => cell(which, column))}
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
    ${columns.length > MOST_SHOWN && html`<p>… and ${columns.length - MOST_SHOWN} more tokens</p>`}
    ${[
      ["answer", pair.answer_tokens],
      ["foil", pair.foil_tokens],
    ]
      .filter(([, ids]) => ids.length > 1)
      .map(
        ([name, ids]) => html`<p>The ${name} has ${ids.length} tokens, so each cell takes more passes.</p>`,
      )}
    ${pair.notes.map((note) => html`<p class="note">Note: <${Coded} text=${note} /></p>`)}
  `;
}
