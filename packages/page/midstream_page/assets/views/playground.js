// Playground: one prompt, sliders for modules, and the baseline's and the steered stream side by side.

import { get } from "../lib/api.js";
import {
  Button,
  Control,
  Copy,
  Empty,
  Field,
  Problem,
  html,
  useEffect,
  useForm,
  useRef,
  useState,
} from "../lib/ui.js";
import { codeOf } from "../lib/code.js";
import { PATHS, bodyOf, fieldOf, steeringOf } from "../lib/playground_request.js";
import { Stream, sides } from "../lib/playground_stream.js";
import { useModels } from "../lib/ask.js";
import { Chips, Legend } from "../lib/chips.js";
import { Making, Saving } from "./direction.js";

const FOUND = 8; // modules that are offered at a time
const MOST = 16; // sliders
const GIVEN = 256; // of the prompt's tokens, the last ones
const REACH = 4; // of a slider, either way; the number beside it may be larger
const SHARE = 1; // the same of a direction, whose scale is a share of the row's norm
const MADE = "new direction"; // name of the one that is not saved yet
const STRONG = 4; // times the strongest activation of a feature: its slider's reach
const BEGIN = {
  model: "",
  mode: "plain",
  system: "",
  prompt: "My favourite thing to do at the weekend is",
  max_tokens: "32",
  temperature: "0",
  seed: "",
  modules: [],
  colour: null,
};

/** The feature that the address names, with its strongest activation in a text. */
function featureOf(query) {
  const [sae, feature] = [query.get("sae"), Number(query.get("feature"))];
  const value = Number(query.get("value")) || 1;
  const entry = { sae, feature, op: "add", positions: { start: 1 } };
  return { name: `${sae} feature ${feature}`, scale: value, reach: STRONG * value, entry };
}

/** The modules that may be added: those that match, some at a time. */
function Adding({ modules, used, add }) {
  const [text, setText] = useState("");
  const [count, setCount] = useState(FOUND);
  const wanted = text.trim().toLowerCase();
  const matching = modules.filter(
    ({ name, description }) => !used.has(name) && `${name} ${description}`.toLowerCase().includes(wanted),
  );
  const shown = matching.slice(0, count);
  return html`
    <div class="adding">
      ${
        modules.length > FOUND &&
        html`
          <${Control}
            label="Find a module"
            type="search"
            maxlength="128"
            value=${text}
            change=${(event) => (setText(event.target.value), setCount(FOUND))}
          />
        `
      }
      <ul class="offers">
        ${shown.map(
          ({ name, description }) => html`
            <li key=${name}>
              <${Button}
                kind="small"
                title=${description || null}
                disabled=${used.size >= MOST}
                onClick=${() => add(name)}
              >
                ${`Add ${name}`}
              <//>
            </li>
          `,
        )}
      </ul>
      <p class="soft" role="status">
        ${
          matching.length
            ? `${shown.length} of ${matching.length} modules`
            : modules.length
              ? "no other modules"
              : ""
        }
        ${used.size >= MOST ? `; at most ${MOST} at a time` : ""}
      </p>
      ${
        matching.length > count &&
        html`<${Button} kind="small" onClick=${() => setCount(count + FOUND)}>More modules<//>`
      }
      ${
        !modules.length &&
        html`
          <${Empty}>
            There are no modules yet. Make a direction below, or register a vector
            with <code>midstream put module</code>.
          <//>
        `
      }
    </div>
  `;
}

function Slider({ module, wrong, change, remove, children }) {
  const { name, scale, entry } = module;
  const reach = module.reach || (entry ? SHARE : REACH);
  const step = module.reach ? reach / 40 : entry ? 0.05 : 0.1;
  return html`
    <div class="slider" role="group" aria-label=${`Module ${name}`}>
      <span class="mono">${name}</span>
      <input
        type="range"
        min=${-reach}
        max=${reach}
        step=${step}
        value=${scale}
        aria-label=${`Scale of ${name}`}
        onInput=${(event) => change(Number(event.target.value))}
      />
      <input
        type="number"
        step=${step}
        min="-1000000"
        max="1000000"
        value=${scale}
        aria-label=${`Scale of ${name}, as a number`}
        onChange=${(event) =>
          Number.isFinite(event.target.valueAsNumber) && change(event.target.valueAsNumber)}
      />
      <${Button} kind="small" aria-label=${`Remove ${name}`} onClick=${remove}>Remove<//>
      ${wrong && html`<small class="bad" role="alert">${wrong}</small>`}
      ${children}
    </div>
  `;
}

/** What may colour the tokens: labels of probes, and the vectors of the modules that are used. */
function choices(probes, modules, used) {
  const found = [];
  for (const { name, content } of probes)
    content.labels.forEach((label, column) =>
      found.push({ group: "probes", text: `${name}: ${label}`, colour: { probe: name, label, column } }),
    );
  for (const { name, entries } of modules) {
    if (!used.has(name)) continue;
    for (const entry of entries.filter(({ tensors }) => tensors.length === 1))
      for (const layer of entry.layers)
        found.push({
          group: "projection onto a module",
          text: `${name}, layer ${layer} (${entry.hook})`,
          colour: { module: name, hook: entry.hook, layer },
        });
  }
  return found.map((choice) => ({ ...choice, id: JSON.stringify(choice.colour) }));
}

/**
 * One side's text; once its tokens are known, as coloured chips. `limit`: the value whose colour is
 * the darkest.
 */
function Pane({ title, side, limit, values, colour }) {
  const text = side.pieces.join("");
  const item = (word, position) => {
    const value = side.values.get(position);
    return {
      key: position,
      word,
      value: colour ? (value === undefined ? null : value) : undefined,
      share: value === undefined || value === null || !limit ? null : value / limit,
    };
  };
  const words = side.words || side.pieces;
  const offset = side.words ? side.given.length : side.first;
  return html`
    <section class="pane" aria-label=${title} aria-busy=${side.state === "running" ? "true" : "false"}>
      <h2>${title}</h2>
      <p class="soft" role="status">${side.note}</p>
      <${Problem} error=${side.error} />
      ${
        colour && (side.words || side.first !== null)
          ? html`
              ${
                side.words &&
                html`
                  ${
                    side.given.length > GIVEN &&
                    html`<p class="soft">the last ${GIVEN} of ${side.given.length} tokens of the prompt</p>`
                  }
                  <${Chips}
                    label=${`${title}: prompt`}
                    items=${side.given.map(item).slice(-GIVEN)}
                    values=${values}
                  />
                `
              }
              <${Chips}
                label=${`${title}: output`}
                items=${words.map((word, n) => item(word, offset + n))}
                values=${values}
              />
            `
          : html`<p class="text" data-side=${side.name}>${text}</p>`
      }
      ${side.job && html`<p><a class="mono" href=${`#/jobs/${side.job}`}>${side.job}</a></p>`}
    </section>
  `;
}

export default function View({ session, query }) {
  const [modules, setModules] = useState([]);
  const [probes, setProbes] = useState([]);
  const { form, setForm, error, setError, wrong, entry } = useForm(BEGIN, fieldOf);
  const [values, setValues] = useState(false);
  const [, redraw] = useState(0);
  const stream = useRef(null);
  const shown = useRef({ sides: sides(), colour: null });

  const models = useModels(setError);
  useEffect(() => {
    if (models && models[0]) setForm((known) => ({ ...known, model: models[0].id }));
  }, [models]);
  useEffect(() => () => stream.current && stream.current.close(), []);

  // What belongs to a model goes with it: its modules, its probes, and what it was saying.
  useEffect(() => {
    if (!form.model) return undefined;
    const stop = new AbortController();
    const named = `?model=${encodeURIComponent(form.model)}`;
    Promise.all([
      get(`/v1/artifacts/modules${named}`, { signal: stop.signal }),
      get(`/v1/artifacts/probes${named}`, { signal: stop.signal }),
    ]).then(
      ([{ modules: found }, { probes: watching }]) => {
        setModules(found);
        setProbes(watching);
        const name = query.get("module");
        const chosen = found.some((module) => module.name === name) && { name, scale: 1 };
        const first = query.get("sae") ? featureOf(query) : chosen;
        if (first) setForm((known) => ({ ...known, modules: [first] }));
      },
      (failure) => stop.signal.aborted || setError(failure),
    );
    return () => {
      stop.abort();
      if (stream.current) stream.current.close();
      stream.current = null;
      shown.current = { sides: sides(), colour: null };
      setModules([]);
      setProbes([]);
      setError(null);
      setForm((known) => ({ ...known, modules: [], colour: null }));
    };
  }, [form.model]);

  const used = new Set(form.modules.map(({ name }) => name));
  const running = stream.current !== null && stream.current.open;
  const coloured = choices(probes, modules, used);
  const change = (name, scale) =>
    setForm((known) => ({
      ...known,
      modules: known.modules.map((module) => (module.name === name ? { ...module, scale } : module)),
    }));
  const remove = (name) =>
    setForm((known) => ({
      ...known,
      modules: known.modules.filter((module) => module.name !== name),
      colour: known.colour && known.colour.module === name ? null : known.colour,
    }));

  const run = async (chosen) => {
    setError(null);
    const begun = new Stream(chosen, () => redraw((n) => n + 1));
    stream.current = begun;
    shown.current = { sides: begun.sides, colour: chosen.colour };
    redraw((n) => n + 1); // what the last run said goes at once
    const refused = await begun.run();
    if (stream.current === begun && refused) setError(refused);
    redraw((n) => n + 1);
  };
  const panes = useRef(null);
  const latest = useRef(form);
  latest.current = form; // what was typed while a direction was made counts
  const made = (entry, scale) => {
    const next = {
      ...latest.current,
      modules: [...latest.current.modules.filter((module) => module.name !== MADE), { name: MADE, scale, entry }],
    };
    setForm(next);
    run(next).catch(setError);
    panes.current.scrollIntoView({ block: "nearest" });
  };
  const saved = (made) => async (name) => {
    setForm((known) => ({
      ...known,
      modules: [
        ...known.modules.filter((module) => ![made.name, name].includes(module.name)),
        { name, scale: 1 },
      ],
    }));
    setModules((await get(`/v1/artifacts/modules?model=${encodeURIComponent(form.model)}`)).modules);
  };
  const served = models && models.find(({ id }) => id === form.model);
  const { sides: both, colour } = shown.current;
  const limit = Math.max(...both.map((side) => side.limit()));

  if (models && !models.length) return html`<h1>Playground</h1><${Empty}>No model is served.<//>`;
  return html`
    <h1>Playground</h1>
    <form class="playground" onSubmit=${(event) => event.preventDefault()}>
      <div class="inline">
        ${models && entry("model", "Model", { options: models.map(({ id }) => id) })}
        ${entry("mode", "Kind", { options: { plain: "plain text", chat: "chat" } })}
        ${entry("max_tokens", "Max tokens", { type: "number", min: 1 })}
        ${entry("temperature", "Temperature", { type: "number", min: 0, max: 2, step: 0.1 })}
        ${entry("seed", "Seed", { type: "number", step: 1, placeholder: "none" })}
      </div>
      ${form.mode === "chat" && entry("system", "System message")}
      ${entry("prompt", form.mode === "chat" ? "User message" : "Prompt", { rows: 3 })}
      <fieldset>
        <legend>Modules</legend>
        ${form.modules.map(
          (module) => html`
            <${Slider}
              key=${module.name}
              module=${module}
              wrong=${wrong(`module ${module.name}`)}
              change=${(scale) => change(module.name, scale)}
              remove=${() => remove(module.name)}
            >
              ${
                module.entry &&
                html`
                  <small>
                    ${module.entry.sae ? "in units of the feature's activation" : "× the norm of each row"}
                  </small>
                  <${Saving} model=${form.model} module=${module} saved=${saved(module)} />
                `
              }
            <//>
          `,
        )}
        <${Adding}
          modules=${modules}
          used=${used}
          add=${(name) => setForm((known) => ({ ...known, modules: [...known.modules, { name, scale: 1 }] }))}
        />
        ${served && html`<${Making} key=${served.id} model=${served} made=${made} />`}
      </fieldset>
      <div class="inline">
        <${Field} label="Colour tokens by" error=${wrong("colour")}>
          ${(id) => html`
            <select
              id=${id}
              value=${form.colour ? JSON.stringify(form.colour) : ""}
              onChange=${({ target: { value } }) =>
                setForm((known) => ({ ...known, colour: value ? JSON.parse(value) : null }))}
            >
              <option value="">nothing</option>
              ${[...new Set(coloured.map(({ group }) => group))].map(
                (group) => html`
                  <optgroup key=${group} label=${group}>
                    ${coloured
                      .filter((choice) => choice.group === group)
                      .map(
                        ({ id: value, text }) => html`<option key=${value} value=${value}>${text}</option>`,
                      )}
                  </optgroup>
                `,
              )}
            </select>
          `}
        <//>
        <label>
          <input
            type="checkbox"
            checked=${values}
            onChange=${(event) => setValues(event.target.checked)}
          /> show values
        </label>
      </div>
      <${Problem} error=${error} />
      <div class="inline">
        <${Button}
          kind="main"
          disabled=${!form.model || !form.prompt || !form.max_tokens || !form.temperature || running}
          onClick=${() => run(form)}
          onError=${setError}
        >
          Run
        <//>
        ${running && html`<${Button} onClick=${() => stream.current.stop()} onError=${setError}>Stop<//>`}
        ${
          !steeringOf(form).length &&
          html`<span class="soft">No module is set: both sides are the baseline.</span>`
        }
      </div>
    </form>
    ${
      colour &&
      limit > 0 &&
      html`
        <${Legend}
          what=${
            colour.probe
              ? `${colour.probe}: ${colour.label}`
              : `projection onto ${colour.module}, layer ${colour.layer}`
          }
          from=${-limit}
          to=${limit}
        />
      `
    }
    <div class="panes" ref=${panes}>
      ${both.map(
        (side) => html`
          <${Pane}
            key=${side.name}
            title=${side.title}
            side=${side}
            limit=${limit}
            values=${values}
            colour=${colour}
          />
        `,
      )}
    </div>
    <h2>The steered request as code</h2>
    <${Copy} label="Code" tabs=${codeOf(PATHS[form.mode], bodyOf(form, true), session.auth !== "open")} />
  `;
}
