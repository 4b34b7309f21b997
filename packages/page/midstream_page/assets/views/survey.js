// Surveys of a harvest: the form that starts one, and one's features with the contexts where they are
// most active.

import { post } from "../lib/api.js";
import { Button, Problem, html, useForm, useState } from "../lib/ui.js";
import { brief, short } from "../lib/chips.js";
import { count, fine } from "../lib/format.js";
import { Id } from "../lib/parts.js";
import { useAnswer } from "../lib/ask.js";
import { SaveAs } from "../plots/save.js";
import { Bars, Examples, ended } from "../lib/readings.js";

const titled = ({ survey: { sae, against, top } }) =>
  [sae && `features of ${sae.name}`, against && `compared with ${against}`, count(top, "example")]
    .filter(Boolean)
    .join(", ");

/** A harvest's finished surveys, and a form for another. `look` asks for the harvest again. */
export function Surveys({ harvest, look }) {
  const { form, error, setError, entry } = useForm({ top: "10" });
  const found = useAnswer(`/v1/artifacts/saes?model=${encodeURIComponent(harvest.model)}`, setError);
  const saes = (found && found.saes) || [];
  const send = async () => {
    setError(null);
    const { id } = await post(`/v1/harvests/${harvest.id}/surveys`, {
      sae: form.sae || saes[0].name,
      top: Number(form.top),
    });
    const { state, error: problem } = await ended(id);
    if (state !== "succeeded") throw new Error(problem ? problem.detail : `The survey is ${state}.`);
    await look();
  };
  return html`
    <section aria-label="Surveys">
      <h2>Features</h2>
      ${
        (harvest.surveys || []).length > 0 &&
        html`
          <ul>
            ${harvest.surveys.map(
              (entry) => html`
                <li key=${entry.job}>
                  <a href=${`#/harvests/${harvest.id}/${entry.job}`}>${titled(entry)}</a>
                </li>
              `,
            )}
          </ul>
        `
      }
      ${found && !saes.length && html`<p class="soft">No registered autoencoder reads these rows.</p>`}
      ${
        saes.length > 0 &&
        html`
          <form class="fields" onSubmit=${(event) => event.preventDefault()}>
            ${entry("sae", "Autoencoder", { options: saes.map(({ name }) => name) })}
            ${entry("top", "Examples of each feature", { type: "number", min: 1, max: 256 })}
            <${Button} onClick=${send} onError=${setError}>Find examples<//>
          </form>
        `
      }
      <${Problem} error=${error} />
    </section>
  `;
}

const Sides = ({ values, text }) => values.map(text).join(" → ");

/** One survey: its features, and the examples of the one that is picked. */
export default function Survey({ harvest, job }) {
  const [error, setError] = useState(null);
  const [feature, pick] = useState(null);
  const [order, setOrder] = useState("density");
  const view = useAnswer(`/v1/harvests/${encodeURIComponent(harvest)}`, setError);
  const survey = `/v1/harvests/${encodeURIComponent(harvest)}/surveys/${encodeURIComponent(job)}`;
  const path = `${survey}?limit=100&order=${order}`;
  const listed = useAnswer(path, setError);
  const answer = useAnswer(feature === null ? path : `${path}&feature=${feature}`, setError);
  const { against, sae } = listed ? listed.survey.survey : {};
  const features = listed ? listed.features : [];
  const chosen = features.find((each) => each.feature === (feature ?? (features[0] || {}).feature));
  const rows = listed && count(listed.survey.rows, "row");
  const active = chosen && Sides({ values: chosen.density, text: fine });
  const largest = Math.max(1e-9, ...features.map(({ density }) => Math.max(...density)));
  return html`
    <h1>${against ? "Comparison" : "Features"}</h1>
    <p>
      <a href=${`#/harvests/${harvest}`}>Its harvest</a> · <a href=${`#/jobs/${job}`}>its job</a> · <${Id}
        id=${job}
      />
    </p>
    <${Problem} error=${error} />
    ${
      listed &&
      html`
        <p class="finding">
          ${
            against &&
            `Compared with ${against}: a mean KL divergence of ${short(listed.survey.mean_kl)} nats over ${rows}. `
          }
          ${sae && chosen && `Feature ${chosen.feature} of ${sae.name} is active on ${active} of ${rows}.`}
        </p>
        <div class="reading even">
          ${
            sae &&
            html`
              <section class="card" aria-label="Features">
                <h2>Features</h2>
                <p class="inline">
                  <label>
                    By <select value=${order} onChange=${({ target }) => setOrder(target.value)}>
                      <option value="density">density</option>
                      <option value="mean">mean activation</option>
                    </select>
                  </label>
                  ${against && html`<span class="soft">largest change first</span>`}
                </p>
                <div class="scrolls" tabindex="0" role="group" aria-label="List">
                  <${Bars}
                    label="Features of the harvest"
                    onPick=${against ? null : pick}
                    items=${features.map((each) => ({
                      key: each.feature,
                      active: chosen === each,
                      text: html`
                        ${each.feature} <span class="soft">
                          mean ${Sides({ values: each.mean, text: brief })}
                        </span>
                      `,
                      value: Sides({ values: each.density, text: fine }),
                      share: each.density[0] / largest,
                    }))}
                  />
                </div>
              </section>
            `
          }
          <aside class="card" tabindex="0" aria-label="Examples">
            <h2>
              ${against ? "Tokens that differ most" : `Examples of feature ${chosen ? chosen.feature : ""}`}
            </h2>
            ${
              view &&
              answer &&
              html`
                <${Examples}
                  model=${view.model}
                  examples=${answer.examples}
                  what=${against ? "KL divergence in nats" : "activation"}
                />
              `
            }
          </aside>
        </div>
        <${SaveAs}
          name=${job}
          title=${titled(listed.survey)}
          rows=${
            features.length
              ? features.map(({ feature: id, density, mean }) => ({ feature: id, density, mean }))
              : answer
                ? answer.examples
                : []
          }
        />
      `
    }
  `;
}
