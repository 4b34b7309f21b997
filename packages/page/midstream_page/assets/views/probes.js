// Probes: the score of each token, as shaded text and as a line with its threshold.

import { post } from "../lib/api.js";
import { html, useState, useTask, Loading } from "../lib/ui.js";
import { count, percent } from "../lib/format.js";
import { Table } from "../lib/parts.js";
import { Plot } from "../plots/plot.js";
import { short, visible } from "../lib/chips.js";
import { useAnswer } from "../lib/ask.js";
import { Reading, ReadingForm, quoted, useWords } from "../lib/readings.js";
import { TokenScores, aggregates } from "../plots/token_scores.js";

const form = {
  name: "probes",
  action: "Score the text",
  example: "The service was slow, but the cook was a genius.",
  registered: "/v1/artifacts/probes",
  missing: (_, { probes }) =>
    !probes.length &&
    html`
      <p>
        No probe is registered. Train one with <code>midstream fit probe</code>, or see the guide to probes.
      </p>
    `,
  fields: (_, { probes }) => [
    {
      name: "probe",
      label: "Probe",
      api: "probes",
      value: probes[0].name,
      options: Object.fromEntries(
        probes.map(({ name, content }) => [
          name,
          `${name}: ${content.labels.join(", ")} at ${content.hook}, layer ${content.layer}`,
        ]),
      ),
    },
    {
      name: "max_tokens",
      label: "Tokens to generate",
      api: "sampling.max_tokens",
      value: "16",
      type: "number",
      min: 1,
    },
  ],
  more: ({ probe }, { probes }) =>
    html`<${HeldOut} key=${probe} probe=${probes.find(({ name }) => name === probe) || probes[0]} />`,
  body: ({ probe, max_tokens }) => ({
    probes: [{ probe, tokens: true }],
    sampling: { max_tokens: Number(max_tokens), temperature: 0 },
  }),
};

/** How a probe scored rows that it was not trained on, where its registration says so. */
function HeldOut({
  probe: {
    name,
    held_out: held = [],
    content: { labels, thresholds },
  },
}) {
  const [label, choose] = useState(0);
  if (!held.length) return null;
  const {
    roc,
    histogram: { edges, negative, positive },
  } = held[label];
  const points = roc.fpr.map((x, n) => ({
    x,
    y: roc.tpr[n],
    tip: `${percent(roc.tpr[n])} of ${labels[label]} found, ${percent(x)} of the others taken for it`,
  }));
  const bars = (counts, what) =>
    counts.map((y, n) => ({
      x: edges[n],
      to: edges[n + 1],
      y,
      tip: `${count(y, "row")} ${what} from ${short(edges[n])} to ${short(edges[n + 1])}`,
    }));
  const share = { low: 0, high: 1, text: percent };
  return html`
    <details class="held-out" open>
      <summary>How well ${name} separates held-out rows</summary>
      ${
        labels.length > 1 &&
        html`
          <p class="inline">
            <label>
              Label <select value=${label} onChange=${({ target }) => choose(Number(target.value))}>
                ${labels.map((each, n) => html`<option value=${n}>${each}</option>`)}
              </select>
            </label>
          </p>
        `
      }
      <div class="reading even">
        <${Plot}
          title=${`ROC: AUC ${roc.auc.toFixed(3)}`}
          name=${`${name}.${labels[label]}.roc`}
          height=${260}
          rows=${roc.fpr.map((fpr, n) => ({ fpr, tpr: roc.tpr[n] }))}
          x=${{ ...share, label: "share of the others at or above a threshold" }}
          y=${{ ...share, label: `share of ${labels[label]}` }}
          series=${[
            { kind: "line", points },
            {
              kind: "line",
              tone: "soft",
              quiet: true,
              points: [0, 1].map((value) => ({ x: value, y: value })),
            },
          ]}
        />
        <${Plot}
          title="Scores of both classes"
          name=${`${name}.${labels[label]}.scores`}
          height=${260}
          rows=${negative.map((of, n) => ({
            from: edges[n],
            to: edges[n + 1],
            negative: of,
            positive: positive[n],
          }))}
          x=${{ label: "score" }}
          y=${{ low: 0, label: "rows" }}
          rules=${thresholds[label] === null ? [] : [{ axis: "x", at: thresholds[label], text: "threshold" }]}
          series=${[
            { kind: "bars", name: "others", points: bars(negative, "of the others") },
            {
              kind: "bars",
              name: labels[label],
              tone: "2",
              outline: true,
              points: bars(positive, `of ${labels[label]}`).filter(({ y }) => y),
            },
          ]}
        />
      </div>
    </details>
  `;
}

/**
 * From a decision that turned a policy on to the one that turned it off; the last token's end, where
 * none did.
 */
function spans(decisions, inherited, end) {
  const found = inherited ? [[0, end]] : [];
  for (const { position, event } of decisions) {
    if (event === "trigger" && !inherited) found.push([position, end]);
    else if (found.length) found[found.length - 1][1] = position;
  }
  return found;
}

/**
 * What one policy decided on one prompt; over the tokens, where the request also asked for the scores
 * of its probe.
 */
function Decisions({ found, result, view }) {
  const { policy, decisions, triggers } = found;
  const output = result.outputs[found.request];
  const scored = result.probes.find(
    ({ policy: other, request, digest, tokens }) =>
      !other && tokens && request === found.request && digest === found.digest,
  );
  const words = useTexts(view, output, found.request);
  const done = policy.acts ? policy.actions.join(", ") || "nothing" : "only recorded";
  const summary = html`
    <p class="finding">
      Policy <a href=${`#/policies/${policy.name}`}>
        ${policy.name}
      </a>, version ${policy.version} (${policy.mode}; ${done}): ${
        triggers ? `triggered ${triggers === 1 ? "once" : `${triggers} times`}` : "did not trigger"
      }.
      ${
        policy.inherited
          ? html` On from the start, by <a href=${`#/jobs/${policy.inherited}`}>
              another job
            </a> of the conversation.
            `
          : ""
      }
      ${found.stopped ? " It ended the request." : ""}
      ${policy.sight && policy.sight.whole ? ` It read the whole prompt: ${policy.sight.whole}.` : ""}
    </p>
  `;
  const table =
    decisions.length > 0 &&
    html`
      <${Table}
        label=${`Decisions of ${policy.name}`}
        heads=${["Token", "Decision", "Score", "Done"]}
        rows=${decisions.map(({ position, event, score }) => [
          html`${position}${words ? html` ${quoted(words[position])}` : ""}`,
          event,
          short(score),
          event === "trigger" ? done : "–",
        ])}
      />
    `;
  if (!scored)
    return html`
      ${summary}
      ${table}
      <p class="soft">
        The request did not ask for the scores of single tokens: name the policy's probe
        in <code>probes</code>, with <code>tokens: true</code>, to see them as a line.
      </p>
    `;
  if (!words) return html`${summary}<p class="loading" role="status">Loading …</p>`;
  const raw = scored.tokens.map((row) => row[policy.column || 0]);
  const { condition } = policy;
  const { aggregation = "last", at_least: on, release_below: off } = condition;
  const values = aggregates(raw, condition, output.prompt_tokens, policy.sight);
  const rules = [
    { axis: "y", at: on, text: `on at ${short(on)} or above` },
    ...(off !== null && off !== undefined && off !== on
      ? [{ axis: "y", at: off, text: `off below ${short(off)}`, quiet: true }]
      : []),
  ];
  const marks = [
    ["trigger", "bad", done],
    ["release", "3", "off"],
  ]
    .map(([name, tone, then]) => ({
      kind: "dots",
      name,
      tone,
      size: 5,
      points: decisions
        .filter(({ position, event }) => event === name && position < raw.length)
        .map(({ position, score }) => ({
          x: position,
          y: score,
          tip: `${name} at token ${position} (${visible(words[position])}): ${short(score)}; ${then}`,
        })),
    }))
    .filter(({ points }) => points.length);
  return html`
    ${summary}
    <${TokenScores}
      title=${`Scores that ${policy.name} read`}
      name=${`${view.id}.${found.request}.${policy.name}`}
      what=${
        aggregation === "last"
          ? "score of the token"
          : `${aggregation}${condition.window ? ` of the last ${condition.window} scores` : " of the scores"}`
      }
      values=${values}
      words=${words}
      prompt=${output.prompt_tokens}
      middle=${on}
      rules=${rules}
      bands=${spans(decisions, policy.inherited, raw.length).map(([from, to]) => ({
        axis: "x",
        from: from - 0.5,
        to: to - 0.5,
        tone: "on",
        text: "on",
      }))}
      lines=${[
        ...(aggregation === "last"
          ? []
          : [
              {
                kind: "line",
                name: "score of each token",
                tone: "2",
                quiet: true,
                points: raw.map((y, x) => ({ x, y })),
              },
            ]),
        ...marks,
      ]}
      rows=${raw.map((score, n) => ({
        token: n,
        text: words[n],
        generated: n >= output.prompt_tokens,
        score,
        aggregate: values[n],
        decision: (decisions.find(({ position }) => position === n) || {}).event || "",
      }))}
    />
    ${table}
  `;
}

export function ProbeResult(props) {
  return props.found.policy ? html`<${Decisions} ...${props} />` : html`<${Scores} ...${props} />`;
}

/**
 * One probe's scores of one prompt, as in a job's result; `tokens` are there where the request asked
 * for them.
 */
function Scores({ found, result, view }) {
  const output = result.outputs[found.request];
  const content = useAnswer(
    `/v1/artifacts/probes/${encodeURIComponent(found.probe)}?model=${encodeURIComponent(view.model)}`,
  ); // deleted since: without thresholds
  const labels = Object.keys(found.scores);
  const [label, setLabel] = useState(0);
  const words = useTexts(view, output, found.request);
  const name = labels[label];
  const crossed = found.crossed[name];
  // its numbers, not those of one that took its name
  const known = content && content.digest === found.digest ? content.content : null;
  const threshold = known ? (known.thresholds[label] ?? null) : null;
  const summary = html`
    <p class="finding">
      ${name}: ${short(found.scores[name])}
      ${known && known.aggregation !== "last" ? ` (${known.aggregation})` : ""}
      ${
        threshold === null
          ? ""
          : crossed === undefined
            ? `, below its threshold of ${short(threshold)} all the way`
            : `; it reached its threshold of ${short(threshold)} at token ${crossed}${
                crossed === 0 ? ", the first, whose row is an outlier in most models" : ""
              }`
      }.
      ${found.stopped ? " It ended the request." : ""}
    </p>
  `;
  if (!found.tokens)
    return html`${summary}<p class="soft">The request did not ask for the scores of single tokens.</p>`;
  if (!words || content === undefined) return html`<${Loading} />`;
  const scores = found.tokens.map((row) => row[label]);
  return html`
    ${summary}
    ${
      labels.length > 1 &&
      html`
        <p class="inline">
          <label>
            Label <select value=${label} onChange=${({ target }) => setLabel(Number(target.value))}>
              ${labels.map((each, n) => html`<option value=${n}>${each}</option>`)}
            </select>
          </label>
        </p>
      `
    }
    <${TokenScores}
      title=${`Score of ${name}`}
      about=${`${found.probe}${known ? ` at ${known.hook}, layer ${known.layer}` : ""}`}
      name=${`${view.id}.${found.request}.${found.probe}`}
      what="score"
      values=${scores}
      words=${words}
      prompt=${output.prompt_tokens}
      middle=${threshold ?? 0}
      rules=${
        threshold === null
          ? []
          : [{ axis: "y", at: threshold, text: `threshold ${short(Number(threshold.toPrecision(3)))}` }]
      }
    />
    <p class="soft">
      Scores of ${found.probe}
      ${known ? ` at ${known.hook}, layer ${known.layer}` : ""}. Tokens in italics were generated; the last
      one has no score, because it is never fed back. The first token has no colour: its row is an outlier in
      most models.
    </p>
  `;
}

/** The texts of the tokens of a prompt and its output; null until they are known. */
function useTexts(view, output, request) {
  const given = useAnswer(`/v1/jobs/${view.id}/request`);
  const prompt = given && given.prompts[request];
  const split = useTokens(view.model, prompt ? prompt.text : null);
  const words = useWords(view.model, output.token_ids);
  if (!words || given === undefined || (prompt && prompt.text !== null && !split)) return null;
  const known = split && split.length === output.prompt_tokens;
  return Array.from({ length: output.prompt_tokens + output.token_ids.length }, (_, n) =>
    n < output.prompt_tokens
      ? known
        ? split[n]
        : `${n}`
      : words(output.token_ids[n - output.prompt_tokens]),
  );
}

/** The tokens' texts of a prompt; null until then. */
function useTokens(model, text) {
  const [found, set] = useState(null);
  useTask(
    (signal) => {
      if (text !== null)
        post("/v1/tokenize", { model, prompt: text }, { signal }).then(
          ({ token_strs }) => set(token_strs),
          () => signal.aborted || set([]),
        );
    },
    [model, text],
  );
  return found;
}

export default function View({ params, query, jobs }) {
  return html`
    <h1>Probes</h1>
    <p class="lead">Scores every token of a prompt, and of the answer, with a trained linear probe.</p>
    <${ReadingForm} ...${form} query=${query} />
    <${Reading} key=${params[0]} id=${params[0]} name="probes" jobs=${jobs}>
      ${(result, view, n) => {
        const found = (result.probes || []).filter(({ request }) => request === n);
        return found.length
          ? found.map(
              (each) => html`
                <${ProbeResult} key=${`${n} ${each.probe}`} found=${each} result=${result} view=${view} />
              `,
            )
          : html`<p>This job has no scores.</p>`;
      }}
    <//>
  `;
}
