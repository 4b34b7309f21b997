// SAE features: the text shaded by activation, and the features that are active in it.

import { html, useMemo, useRef, useState, Loading } from "../lib/ui.js";
import { count, fine, number, percent } from "../lib/format.js";
import { Chips, Legend, brief, visible } from "../lib/chips.js";
import { shade } from "../lib/heatmap.js";
import { useAnswer } from "../lib/ask.js";
import { SaveAs } from "../plots/save.js";
import { Bars, Examples, Reading, ReadingForm, moving, quoted, useWords } from "../lib/readings.js";

const LISTED = 12; // features at first

const form = {
  name: "features",
  action: "Read features",
  example: "I think the soup was cold, but my friend told me that the newspaper liked it.",
  registered: "/v1/artifacts/saes",
  missing: ({ readings }, { saes }) =>
    readings.features
      ? html`<p>This model reads no features: ${readings.features}.</p>`
      : !saes.length &&
        html`
          <p>
            No sparse autoencoder is registered. Put one below the
            folder <code>artifacts_dir/saes</code>, then run <code>midstream put sae NAME PATH</code>.
          </p>
        `,
  fields: (_, { saes }) => [
    {
      name: "sae",
      label: "Autoencoder",
      api: "features[0].sae",
      value: saes[0].name,
      options: Object.fromEntries(
        saes.map(({ name, hook, layer, form: { d_sae } }) => [
          name,
          `${name}: ${d_sae} features of ${hook}, layer ${layer}`,
        ]),
      ),
    },
    {
      name: "top_k",
      label: "Features per token",
      api: "features[0].top_k",
      value: "10",
      type: "number",
      min: 1,
      max: 256,
    },
  ],
  body: ({ sae, top_k }) => ({ features: [{ sae, top_k: Number(top_k) }] }),
};

/**
 * Path of the newest survey of the features that `reading` has; undefined until it is known, null
 * without one.
 */
function useSurvey({ sae, digest }, model) {
  const found = useAnswer(`/v1/harvests?surveyed=${encodeURIComponent(sae)}`);
  if (!found) return found;
  const surveys = found.harvests
    .filter((harvest) => harvest.model === model)
    .flatMap(({ id, surveys: all }) =>
      all.map(({ job, survey }) => ({ path: `harvests/${id}`, job, survey })),
    );
  const same = surveys
    .filter(({ survey }) => survey.sae.digest === digest && !survey.against)
    .sort((a, b) => (a.job < b.job ? 1 : -1));
  return same[0] || null;
}

/** Where else feature `id` is active, as the survey found. */
function Elsewhere({ id, survey: { path, job }, model, box }) {
  const found = useAnswer(`/v1/${path}/surveys/${job}?limit=1&feature=${id}`);
  return html`
    <aside class="card" ref=${box} tabindex="0" aria-label="Examples">
      <h2>Examples of feature ${id}</h2>
      ${
        found &&
        html`
          <p class="soft">
            Active on ${fine(found.figures.density[0])} of ${count(
              found.survey.rows,
              "row",
            )}, where its mean is ${brief(found.figures.mean[0])}. <a href=${`#/${path}/${job}`}>
              The survey
            </a>
          </p>
          <${Examples} model=${model} examples=${found.examples} />
        `
      }
      ${found === null && html`<p class="soft">The survey cannot be read.</p>`}
    </aside>
  `;
}

/** One prompt's features of one autoencoder, as in a job's result. */
export function FeaturesResult({ reading, model }) {
  const { positions, features, activations, active, errors } = reading;
  const [feature, setFeature] = useState(null);
  const [many, setMany] = useState(LISTED);
  const [at, move] = useState(Math.min(1, positions.length - 1));
  const word = useWords(model, reading.token_ids);
  const survey = useSurvey(reading, model);
  const examples = useRef(null);
  const listed = useMemo(() => {
    const found = new Map();
    features.forEach((row, n) =>
      row.forEach((id, k) => {
        // the first token's row is an outlier in most models
        if (positions[n] === 0 && positions.length > 1) return;
        const known = found.get(id) || { id, most: 0, where: n, tokens: 0 };
        known.tokens += 1;
        if (activations[n][k] > known.most) Object.assign(known, { most: activations[n][k], where: n });
        found.set(id, known);
      }),
    );
    return [...found.values()].sort((a, b) => b.most - a.most);
  }, [reading]);
  if (!word || survey === undefined) return html`<${Loading} />`;
  const of = (n, id) => activations[n][features[n].indexOf(id)] ?? 0;
  if (!positions.length) return html`<p>No position was read.</p>`;
  const values = positions.map((_, n) => (feature === null ? (activations[n][0] ?? 0) : of(n, feature)));
  const chosen = listed.find(({ id }) => id === feature);
  const top = chosen ? chosen.most : listed.length ? listed[0].most : 1;
  const pick = (id) => {
    setFeature(id === feature ? null : id);
    if (examples.current) examples.current.scrollIntoView({ block: "nearest" });
  };
  const text = html`
    <div
      class="card reading-chips"
      tabindex="0"
      role="group"
      aria-label="Tokens"
      onKeyDown=${moving({ row: 0, column: at }, ({ column }) => move(column), 1, positions.length)}
    >
      <${Chips}
        label="Tokens by activation"
        paint=${shade}
        active=${at}
        onPick=${move}
        values
        text=${brief}
        items=${positions.map((position, n) => ({
          key: n,
          word: word(reading.token_ids[n]),
          value: values[n],
          share: position === 0 && positions.length > 1 ? null : values[n] / top,
        }))}
      />
      <${Legend}
        low=${0}
        paint=${shade}
        from=${0}
        to=${top}
        text=${brief}
        what=${feature === null ? "largest activation of any feature" : `activation of feature ${feature}`}
      />
      ${
        feature !== null &&
        html`
          <button type="button" class="button small" onClick=${() => setFeature(null)}>
            Show all features
          </button> <a
            class="button small"
            href=${`#/playground?sae=${encodeURIComponent(reading.sae)}&feature=${feature}&value=${brief(top)}`}
          >
            Steer by it
          </a>
        `
      }
    </div>
  `;
  const lists = html`
    <section class="card" aria-label="Features of the text">
      <h2>Features of the text</h2>
      <${Bars}
        label="Features"
        onPick=${pick}
        items=${listed.slice(0, many).map(({ id, most, where, tokens }) => ({
          key: id,
          active: id === feature,
          text: html`
            ${id} <span class="soft">
              at ${quoted(word(reading.token_ids[where]))}, ${count(tokens, "token")}
            </span>
          `,
          value: brief(most),
          share: most / listed[0].most,
        }))}
      />
      ${
        listed.length > many &&
        html`
          <p class="inline">
            <button type="button" class="button small" onClick=${() => setMany(many * 2)}>More</button>
            <span class="soft">the ${many} strongest of ${listed.length}</span>
          </p>
        `
      }
    </section>
    <section class="card" aria-label="Features of a token">
      <h2>At ${quoted(word(reading.token_ids[at]))} (position ${positions[at]})</h2>
      <${Bars}
        label="Features of the token"
        onPick=${pick}
        items=${features[at].map((id, k) => ({
          key: id,
          active: id === feature,
          text: `${id}`,
          value: brief(activations[at][k]),
          share: activations[at][k] / (activations[at][0] || 1),
        }))}
      />
      <p class="soft">
        ${number(active[at])} features are active here; they leave ${percent(
          errors[at],
        )} of the row's norm unexplained.
      </p>
    </section>
  `;
  return html`
    <p class="finding">
      ${
        chosen
          ? html`
              Feature ${feature} is among the most active of ${count(
                chosen.tokens,
                "token",
              )}, most at ${quoted(word(reading.token_ids[chosen.where]))} (${brief(chosen.most)}).
            `
          : listed.length
            ? html`
                ${count(listed.length, "feature")} are among the most active; feature ${listed[0]
                  .id} is the strongest, at ${quoted(word(reading.token_ids[listed[0].where]))}.
              `
            : "No feature is active."
      }
    </p>
    ${
      survey && listed.length
        ? html`
            <div class="reading uneven">
              <div>${text}<div class="lists">${lists}</div></div>
              <${Elsewhere} id=${feature ?? listed[0].id} survey=${survey} model=${model} box=${examples} />
            </div>
          `
        : html`
            ${text}
            <div class="reading even">${lists}</div>
            <p class="soft">
              No survey of ${reading.sae} says where else a feature is active: find examples under <a
                href="#/harvests"
              >
                Harvests
              </a>.
            </p>
          `
    }
    <p class="soft">
      Features of ${reading.sae} at ${reading.hook}, layer ${reading.layer}. Click a feature to shade the text
      by it, or a token (or use the arrow keys) to see its features.
      ${
        positions[0] === 0 && positions.length > 1
          ? ` The first token, ${visible(word(reading.token_ids[0]))}, has no colour: ` +
            "its row is an outlier in most models."
          : ""
      }
    </p>
    <${SaveAs}
      name="features"
      title=${`Features of ${reading.sae} at ${reading.hook}, layer ${reading.layer}`}
      rows=${() =>
        positions.flatMap((position, n) =>
          features[n].map((id, k) => ({
            position,
            token: word(reading.token_ids[n]),
            feature: id,
            activation: activations[n][k],
          })),
        )}
    />
  `;
}

export default function View({ params, query, jobs }) {
  return html`
    <h1>Features</h1>
    <p class="lead">
      Finds what a sparse autoencoder sees in a text: which features are active, and at which token.
    </p>
    <${ReadingForm} ...${form} query=${query} />
    <${Reading} key=${params[0]} id=${params[0]} name="features" jobs=${jobs}>
      ${(result, view, n) => {
        const found = (result.features || []).filter(({ request }) => request === n);
        return found.length
          ? found.map(
              (reading) => html`
                <${FeaturesResult} key=${`${n} ${reading.sae}`} reading=${reading} model=${view.model} />
              `,
            )
          : html`<p>This job has no features.</p>`;
      }}
    <//>
  `;
}
