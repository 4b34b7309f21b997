// Readings of a job, as its page shows them.

import { html, useState } from "../lib/ui.js";
import { AttentionResult } from "./attention.js";
import { FeaturesResult } from "./features.js";
import { LensResult } from "./lens.js";
import { ProbeResult } from "./probes.js";
import { short } from "../lib/chips.js";
import { numbersOf } from "../lib/tensors.js";

const SHOWN = 12;
/** The arrays that an installed reader returned on one pipeline stage, and what each begins with. */
const arraysOf = ({ sites, arrays }) =>
  Object.entries(arrays).map(([name, array]) => {
    const numbers = numbersOf(array);
    const at = Object.entries(sites).map(([hook, layers]) => `${hook} ${layers.join(", ")}`);
    return html`
      <dt>${name}</dt>
      <dd>
        ${array.dtype} [${array.shape.join(", ")}] at ${at.join("; ")}:${" "}
        ${numbers.slice(0, SHOWN).map(short).join(" ")}${numbers.length > SHOWN && " …"}
      </dd>
    `;
  });

/**
 * The lens, features, scores and attention patterns of one prompt of a job, where it has them.
 * `attention`: it captured queries and keys.
 */
export default function Answers({ result, view, attention }) {
  const [request, choose] = useState(0);
  const of = (field) => (result[field] || []).filter((found) => found.request === request);
  const model = view.model;
  return html`
    ${
      result.outputs.length > 1 &&
      html`
        <p class="inline">
          <label>
            Readings of prompt <input
              type="number"
              min="0"
              max=${result.outputs.length - 1}
              value=${request}
              onInput=${({ target }) =>
                choose(
                  Math.max(0, Math.min(result.outputs.length - 1, Math.trunc(target.valueAsNumber) || 0)),
                )}
            />
          </label>
        </p>
      `
    }
    ${of("lens").map(
      (reading) =>
        html`<h3>Lens</h3><${LensResult} key=${`lens ${request}`} reading=${reading} model=${model} />`,
    )}
    ${of("features").map(
      (reading) => html`
        <h3>Features of ${reading.sae}</h3>
        <${FeaturesResult} key=${`${reading.sae} ${request}`} reading=${reading} model=${model} />
      `,
    )}
    ${of("readers").map(
      (reading) => html`
        <h3>${reading.name}</h3>
        <dl class="facts">${reading.parts.flatMap(arraysOf)}</dl>
      `,
    )}
    ${of("probes").map(
      (found) => html`
        <h3>${found.policy ? `Decisions of ${found.policy.name}` : `Scores of ${found.probe}`}</h3>
        <${ProbeResult} key=${`${found.probe} ${request}`} found=${found} result=${result} view=${view} />
      `,
    )}
    ${
      attention &&
      html`
        <h3>Attention</h3>
        <${AttentionResult} key=${`attention ${request}`} job=${view.id} model=${model} request=${request} />
      `
    }
  `;
}
