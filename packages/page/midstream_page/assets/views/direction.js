// Playground: a direction from two lists of texts, which becomes a slider, and a module once it is saved.

import { put } from "../lib/api.js";
import { Button, Problem, byStart, html, useEffect, useForm, useRef, useState } from "../lib/ui.js";
import { count } from "../lib/format.js";
import { short } from "../lib/chips.js";
import { MOST, direction, linesOf } from "../lib/direction.js";
import { entryOf } from "../lib/playground_request.js";
import { Plot } from "../plots/plot.js";

const EXAMPLE = {
  positive: [
    "The ocean waves crash on the sandy beach",
    "A ship sails across the deep blue sea",
    "Fish swim below the surface of the water",
  ].join("\n"),
  negative: [
    "The office printer is out of paper again",
    "A train crosses the dry inland plain",
    "The committee met on the third floor",
  ].join("\n"),
};
const SCALE = 0.2; // of each row's norm

const SIDES = ["away", "towards"]; // from below

/**
 * How far each text lies along the direction: dots in a row for each list. `texts`: as in `found`.
 */
function Spread({ found, texts }) {
  const rows = SIDES.flatMap((list, n) => {
    const of = n ? "positive" : "negative";
    return texts[of].map((text, at) => ({ list, text, component: found[of][at] }));
  });
  const right = rows.filter(({ list, component }) => (list === "towards" ? component > 0 : component < 0));
  return html`
    <${Plot}
      title="Texts along the direction"
      note=${`${right.length} of ${rows.length} on their list's side; the lists' means are ${short(found.norm)} apart`}
      name="direction"
      bare
      rows=${rows}
      height=${150}
      x=${{ label: "component, in the rows' scale; 0: the middle" }}
      y=${{ low: -0.6, high: 1.6, ticks: SIDES.map((list, n) => [n, list]) }}
      rules=${[{ axis: "x", at: 0, quiet: true }]}
      series=${SIDES.map((list, n) => ({
        kind: "dots",
        tone: n ? "2" : "1",
        size: 5,
        points: rows
          .filter((row) => row.list === list)
          .map(({ text, component }) => ({ x: component, y: n, tip: `“${text}”: ${short(component)}` })),
      }))}
    />
  `;
}

/** `model`: the card; `made(entry, scale)`: a direction is ready to be tried. */
export function Making({ model, made }) {
  const { form, error, setError, entry } = useForm({ ...EXAMPLE, layer: "" }, byStart({ capture: "layer" }));
  const [said, say] = useState("");
  const [found, setFound] = useState(null);
  const leave = useRef(new AbortController());
  useEffect(() => () => leave.current.abort(), []);
  const middle = Math.floor(model.num_layers / 2);
  const [positive, negative] = [linesOf(form.positive), linesOf(form.negative)];
  const many = Math.max(positive.length, negative.length) > MOST;
  const run = async () => {
    setError(null);
    setFound(null);
    try {
      const answer = await direction({
        model: model.id,
        layer: form.layer === "" ? middle : Number(form.layer),
        positive,
        negative,
        signal: leave.current.signal,
        said: say,
      });
      setFound({ ...answer, texts: { positive, negative } });
      made(answer.entry, SCALE);
    } catch (failure) {
      if (!leave.current.signal.aborted) throw failure;
    } finally {
      say("");
    }
  };
  const list = (name, label, texts) =>
    entry(name, label, {
      hint: count(texts.length, "text"),
      error: texts.length > MOST ? `at most ${MOST} texts` : null,
      rows: 5,
    });
  return html`
    <details class="making">
      <summary>Make a direction from two lists of texts</summary>
      <p class="soft">
        Write one text a line. The direction is the difference between the mean rows of both lists; it is
        added to every row but the first token's, scaled to a share of the row's norm.
      </p>
      <div class="fields">
        ${list("positive", "Towards these texts", positive)}
        ${list("negative", "Away from these texts", negative)}
      </div>
      ${entry("layer", "At layer", {
        hint: `0 to ${model.num_layers - 1}; ${middle} is the middle`,
        class: "short",
        type: "number",
        min: 0,
        max: model.num_layers - 1,
        placeholder: middle,
      })}
      <div class="inline steady">
        <${Button}
          kind="main"
          disabled=${!positive.length || !negative.length || many}
          onClick=${run}
          onError=${setError}
        >
          Make and try it
        <//>
        <span class="soft" role="status">${said}</span>
      </div>
      <${Problem} error=${error} />
      ${found && html`<${Spread} found=${found} texts=${found.texts} />`}
    </details>
  `;
}

/** Saves a direction, or a feature, with its scale as a module; `saved(name)`. */
export function Saving({ model, module, saved }) {
  const { entry, scale } = module;
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const save = async () => {
    setError(null);
    await put(`/v1/artifacts/modules/${encodeURIComponent(name)}`, {
      model,
      steering: [entryOf(module)],
      description: entry.sae
        ? `feature ${entry.feature} of ${entry.sae}`
        : "difference of means of two lists of texts",
    });
    saved(name);
  };
  return html`
    <div class="saving inline">
      <label>
        Save as a module <input
          maxlength="128"
          placeholder="name"
          value=${name}
          onInput=${({ target }) => setName(target.value.trim())}
        />
      </label>
      <${Button} kind="small" disabled=${!name || !scale} onClick=${save} onError=${setError}>Save<//>
      <${Problem} error=${error} />
    </div>
  `;
}
