// Probes: the score of each token, as shaded text and as a line with its threshold.

import { post } from "../lib/api.js";
import { html, useEffect, useMemo, useState } from "../lib/ui.js";
import { Chips, Legend, short, visible } from "../lib/chips.js";
import { Reading, ReadingForm, Recent, moving, quoted, useAnswer, useWords } from "../lib/readings.js";

const form = {
  name: "probes",
  action: "Score the text",
  example: "The service was slow, but the cook was a genius.",
  registered: "/v1/artifacts/probes",
  missing: (_, { probes }) => !probes.length && html`<p>No probe is registered. Train one with <code>midstream fit probe</code>, or see the guide to probes.</p>`,
  fields: (_, { probes }) => [
    { name: "probe", label: "Probe", api: "probes", value: probes[0].name, options: Object.fromEntries(probes.map(({ name, content }) => [name, `${name}: ${content.labels.join(", ")} at ${content.hook}, layer ${content.layer}`])) },
    { name: "max_tokens", label: "Tokens to generate", api: "sampling.max_tokens", value: "16", type: "number", min: 1 },
  ],
  body: ({ probe, max_tokens }) => ({ probes: [{ probe, tokens: true }], sampling: { max_tokens: Number(max_tokens), temperature: 0 } }),
};

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [720, 200, 48, 22];

/** Scores by position. `threshold`: a dashed line; null: none. `prompt`: how many tokens the prompt has. */
function Line({ scores, threshold, prompt, at, move, words }) {
  const inside = scores.slice(scores.length > 1 ? 1 : 0); // the first token is an outlier in most models
  const low = Math.min(...inside, threshold ?? Infinity, 0);
  const high = Math.max(...inside, threshold ?? -Infinity, 0) || 1;
  const x = (n) => LEFT + ((n + 0.5) / scores.length) * (WIDTH - LEFT);
  const y = (value) => 8 + (1 - (Math.max(low, Math.min(high, value)) - low) / (high - low || 1)) * (HEIGHT - BOTTOM - 12);
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const n = Math.floor((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / ((WIDTH - LEFT) / scores.length));
    move(Math.max(0, Math.min(scores.length - 1, n)));
  };
  return html`<div class="chart line-chart"><svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`Scores from ${short(Math.min(...scores))} to ${short(Math.max(...scores))}`} onMouseMove=${point}>
    ${prompt < scores.length && html`<rect class="generated" x=${x(prompt - 0.5)} y="0" width=${WIDTH - x(prompt - 0.5)} height=${HEIGHT - BOTTOM} /><text x=${x(prompt - 0.5) + 4} y=${HEIGHT - BOTTOM - 8}>generated</text>`}
    ${[...new Set([low, 0, high])].map((value) => html`<line class="axis" x1=${LEFT} x2=${WIDTH} y1=${y(value)} y2=${y(value)} /><text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${short(Number(value.toPrecision(3)))}</text>`)}
    ${threshold !== null && html`<line class="threshold" x1=${LEFT} x2=${WIDTH} y1=${y(threshold)} y2=${y(threshold)} /><text x=${WIDTH - 4} y=${y(threshold) - 5} text-anchor="end">threshold ${short(Number(threshold.toPrecision(3)))}</text>`}
    <polyline class="line" points=${scores.map((value, n) => `${x(n)},${y(value)}`).join(" ")} />
    ${scores.map((value, n) => html`<circle class=${n === at ? "dot here" : "dot"} cx=${x(n)} cy=${y(value)} r=${n === at ? 5 : scores.length > 80 ? 0 : 2.5}><title>${`${visible(words[n])}: ${short(value)}`}</title></circle>`)}
    <text x=${x(at)} y=${HEIGHT - 4} text-anchor=${at > scores.length * 0.9 ? "end" : "middle"}>${visible(words[at])}</text>
  </svg></div>`;
}

/** What one policy decided on one prompt. */
function Decisions({ found: { policy, decisions, triggers } }) {
  const done = policy.acts ? policy.actions.join(", ") : "only recorded";
  return html`<p class="finding">Policy ${policy.name}, version ${policy.version} (${policy.mode}; ${done}): triggered ${triggers} times.${policy.inherited ? ` On from the start, by job ${policy.inherited}.` : ""}</p>
    <ul>${decisions.map(({ position, event, score }) => html`<li>token ${position}: ${event} at ${short(score)}</li>`)}</ul>`;
}

export function ProbeResult(props) {
  return props.found.policy ? html`<${Decisions} ...${props} />` : html`<${Scores} ...${props} />`;
}

/** One probe's scores of one prompt, as in a job's result; `tokens` are there where the request asked for them. */
function Scores({ found, result, view }) {
  const output = result.outputs[found.request];
  const content = useAnswer(`/v1/artifacts/probes/${encodeURIComponent(found.probe)}?model=${encodeURIComponent(view.model)}`); // deleted since: without thresholds
  const given = useAnswer(`/v1/jobs/${view.id}/request`);
  const labels = Object.keys(found.scores);
  const [label, setLabel] = useState(0);
  const [at, move] = useState(found.positions - 1);
  const ids = useMemo(() => output.token_ids, [output]);
  const words = useWords(view.model, ids);
  const prompt = given && given.prompts[found.request];
  const split = useTokens(view.model, prompt ? prompt.text : null);
  const name = labels[label];
  const crossed = found.crossed[name];
  const known = content && content.digest === found.digest ? content.content : null; // its numbers, not those of one that took its name
  const threshold = known ? known.thresholds[label] ?? null : null;
  const summary = html`<p class="finding">${name}: ${short(found.scores[name])}${known && known.aggregation !== "last" ? ` (${known.aggregation})` : ""}${
    threshold === null ? "" : crossed === undefined ? `, below its threshold of ${short(threshold)} all the way` : `; it reached its threshold of ${short(threshold)} at token ${crossed}`
  }.${found.stopped ? " It ended the request." : ""}</p>`;
  if (!found.tokens) return html`${summary}<p class="soft">The request did not ask for the scores of single tokens.</p>`;
  if (!words || content === undefined || given === undefined || (prompt && prompt.text !== null && !split)) return html`<p class="loading" role="status">Loading …</p>`;
  const scores = found.tokens.map((row) => row[label]);
  const text = scores.map((_, n) => (n < output.prompt_tokens ? (split && split.length === output.prompt_tokens ? split[n] : `${n}`) : words(output.token_ids[n - output.prompt_tokens])));
  const middle = threshold ?? 0;
  const reach = Math.max(...scores.slice(scores.length > 1 ? 1 : 0).map((score) => Math.abs(score - middle))) || 1;
  return html`${summary}
    ${labels.length > 1 && html`<p class="inline"><label>Label <select value=${label} onChange=${({ target }) => setLabel(Number(target.value))}>${labels.map((each, n) => html`<option value=${n}>${each}</option>`)}</select></label></p>`}
    <div class="card reading-chips" tabindex="0" role="group" aria-label="Score by token" onKeyDown=${moving({ row: 0, column: at }, ({ column }) => move(column), 1, scores.length)}>
      <${Chips} label="Tokens by score" active=${at} onPick=${move} items=${scores.map((score, n) => ({ key: n, word: text[n], value: score, share: n === 0 && scores.length > 1 ? null : (score - middle) / reach, generated: n >= output.prompt_tokens }))} />
      <${Line} scores=${scores} threshold=${threshold} prompt=${output.prompt_tokens} at=${at} move=${move} words=${text} />
      <p class="note" role="status">${quoted(text[at])} (token ${at}): ${short(scores[at])}</p>
      <${Legend} from=${middle - reach} to=${middle + reach} what=${threshold === null ? "score" : "score; the threshold is in the middle"} />
    </div>
    <p class="soft">Scores of ${found.probe}${known ? ` at ${known.hook}, layer ${known.layer}` : ""}. Tokens in italics were generated; the last one has no score, because it is never fed back. The first token has no colour: its row is an outlier in most models.</p>`;
}

/** The tokens' texts of a prompt; null until then. */
function useTokens(model, text) {
  const [found, set] = useState(null);
  useEffect(() => {
    if (text === null) return undefined;
    const stop = new AbortController();
    post("/v1/tokenize", { model, prompt: text }, stop).then(({ token_strs }) => set(token_strs), () => stop.signal.aborted || set([]));
    return () => stop.abort();
  }, [model, text]);
  return found;
}

export default function View({ params, query, jobs }) {
  return html`<h1>Probes</h1><p class="lead">Scores every token of a prompt, and of the answer, with a trained linear probe.</p>
    <${ReadingForm} ...${form} query=${query} />
    ${params[0] ? html`<${Reading} key=${params[0]} id=${params[0]} jobs=${jobs}>${(result, view, n) => {
      const found = (result.probes || []).filter(({ request }) => request === n);
      return found.length ? found.map((each) => html`<${ProbeResult} key=${`${n} ${each.probe}`} found=${each} result=${result} view=${view} />`) : html`<p>This job has no scores.</p>`;
    }}<//>` : html`<${Recent} name="probes" jobs=${jobs} />`}`;
}
