// A fit: the module or lens that it learned, the effect on held-out examples, and how it was trained.

import { html } from "../lib/ui.js";
import { count, number, percent } from "../lib/format.js";
import { Chart, Stats } from "../lib/parts.js";

const MEASURES = {
  logprob: ["log-probability of held-out targets", " nats"],
  auroc: ["separation of held-out rows (AUROC)", ""],
};
const digits = (value) => number(value, 2);
const name = (value) => html`<strong>${value}</strong>`;

const Table = ({ label, heads, rows }) => html`
  <table aria-label=${label}>
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
    <tbody>
      ${rows.map(
        ([first, ...others]) =>
          html`<tr><th scope="row">${first}</th>${others.map((value) => html`<td>${value}</td>`)}</tr>`,
      )}
    </tbody>
  </table>
`;

/** The outcome of a module's fit. */
function Module({ fit: { name: module, digest, reason, training } }) {
  const { method, hook, examples, steps, sites, losses = [], effect } = training;
  const [what, unit] = MEASURES[effect.measure];
  const trained = losses.filter(({ loss }) => loss !== null && loss !== undefined);
  const ends = losses.length > 1 && ["step 0", `step ${number(losses[losses.length - 1].step)}`];
  const apart = sites.some(({ auroc }) => auroc !== null && auroc !== undefined);
  return html`
    <p class="finding">
      ${
        digest
          ? html`${name(module)} is registered.`
          : html`${name(module)} is not registered${reason ? `: ${reason}` : ""}.`
      }
    </p>
    <${Stats}
      items=${[
        {
          name: "Held-out effect",
          value: `${digits(effect.before)} → ${digits(effect.after)}${unit}`,
          note: `± ${digits(effect.error)}, ${count(effect.examples, "example")}: ${what}`,
          bad: !effect.better,
        },
        { name: "Method", value: method, note: `${hook}, from ${count(examples, "example")}` },
        ...(steps ? [{ name: "Steps kept", value: number(steps) }] : []),
      ]}
    />
    ${
      ends &&
      html`
        <div class="cards">
          <${Chart}
            title="Training loss"
            note="nats per target token"
            ends=${ends}
            points=${trained.map(({ step, loss }) => [step, loss])}
            text=${digits}
          />
          <${Chart}
            title="Validation loss"
            note="nats per target token"
            ends=${ends}
            points=${losses.map(({ step, validation_loss }) => [step, validation_loss])}
            text=${digits}
          />
        </div>
      `
    }
    <p class="soft">
      Dose: how much the module changes a row, as a share of its norm.
      ${apart ? " Separation: AUROC of held-out rows along the vector." : ""}
    </p>
    <${Table}
      label="Effect by layer"
      heads=${["Layer", "Dose", ...(apart ? ["Separation"] : [])]}
      rows=${sites.map(({ layer, dose, auroc }) => [layer, percent(dose), ...(apart ? [digits(auroc)] : [])])}
    />
  `;
}

/** The outcome of a Jacobian lens's fit. */
function Lens({ fit: { lens } }) {
  const { method, rank, prompts, short, not_finite: dropped, errors = [] } = lens.fit;
  const left = [
    short && `${count(short, "prompt")} too short`,
    dropped && `${count(dropped, "gradient")} not finite`,
  ].filter(Boolean);
  return html`
    <p class="finding">
      ${name(lens.name)} is registered. <a href=${`#/lens?through=${encodeURIComponent(`^${lens.name}`)}`}>
        Read a prompt through it
      </a>
    </p>
    <${Stats}
      items=${[
        { name: "Prompts", value: number(prompts), note: left.join(", ") || null },
        { name: "Method", value: method, note: method === "sketched" ? `rank ${number(rank)}` : null },
        ...(errors.length
          ? [
              {
                name: "Error",
                value: `up to ${percent(Math.max(...errors))}`,
                note: "stated, relative to the exact lens",
              },
            ]
          : []),
      ]}
    />
    <p class="mono uri">${lens.path}</p>
    <${Table}
      label="Layers"
      heads=${["Layer", "Error"]}
      rows=${lens.layers.map((layer, n) => [layer, errors.length ? percent(errors[n]) : "exact"])}
    />
  `;
}

/** The outcome of a job of kind `fit`, as in its result. */
export default ({ fit }) =>
  fit.type === "module" ? html`<${Module} fit=${fit} />` : html`<${Lens} fit=${fit} />`;
