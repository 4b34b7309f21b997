// Scores over the tokens of a request, as chips and as a line with one cursor: a probe's with its
// threshold, a policy's with its decisions.

import { html, useState } from "../lib/ui.js";
import { Chips, Legend, short, visible } from "../lib/chips.js";
import { moving, quoted } from "../lib/readings.js";
import { Plot } from "./plot.js";

/** Whether a policy reads a token. `sight`: of the prompt; without one, it reads all of it. */
function readerOf(tokens, prompt, sight) {
  const whole = !sight || Boolean(sight.whole);
  const runs = whole ? [[0, prompt]] : sight.runs || [];
  const ofAnswer = ({ role = "assistant", turn = null, part }) =>
    role === "assistant" && turn === null && part !== "tools";
  const answered = typeof tokens === "string" || tokens.some(ofAnswer);
  return (n) => {
    if (n >= prompt) return answered;
    return tokens !== "generated" && runs.some(([from, to]) => from <= n && n < to);
  };
}

/**
 * The aggregate that decides at each token, null at those that the policy does not read
 * (docs/probes.md, The condition).
 */
export function aggregates(scores, { aggregation, window, decay, schedule }, prompt, sight) {
  const { start = 0, stop = null, every = 1 } = schedule || {};
  const reads = readerOf((schedule || {}).tokens || "content", prompt, sight);
  const seen = [];
  let number = -1;
  let average = null;
  return scores.map((score, n) => {
    if (!reads(n)) return null;
    number += 1;
    const late = stop !== null && number >= stop;
    if (number < start || late || (number - start) % every) return null;
    seen.push(score);
    average = average === null ? score : decay * average + (1 - decay) * score;
    const recent = seen.slice(-(window || 1));
    return {
      last: score,
      max: Math.max(...recent),
      mean: recent.reduce((sum, value) => sum + value, 0) / recent.length,
      exponential: average,
    }[aggregation || "last"];
  });
}

/**
 * `values`: the score of each token, null where there is none; `words`: the tokens; `prompt`: how
 * many are the prompt's. `middle`: the score without a colour; `lines`: more series. The first token
 * sets no scale: its row is an outlier in most models.
 */
export function TokenScores({
  title,
  about,
  name,
  what,
  values,
  words,
  prompt,
  middle,
  rules = [],
  bands = [],
  lines = [],
  rows,
}) {
  const [at, move] = useState(values.length - 1);
  const inside = values.slice(values.length > 1 ? 1 : 0).filter((value) => value !== null);
  const bounds = [
    ...inside,
    ...rules.map((rule) => rule.at),
    ...lines.flatMap(({ points }) => points.slice(1).map(({ y }) => y)),
    0,
  ].filter((value) => value !== null);
  const [least, most] = [Math.min(...bounds), Math.max(...bounds)];
  const room = (most - least || 1) * 0.06;
  const [low, high] = [least - room, most + room];
  const within = (value) => (value === null ? null : Math.max(low, Math.min(high, value)));
  const reach = Math.max(...inside.map((value) => Math.abs(value - middle)), 0) || 1;
  const tip = (n) =>
    `${visible(words[n])} (token ${n}): ${values[n] === null ? "not read" : short(values[n])}`;
  return html`
    <div
      class="card reading-chips"
      tabindex="0"
      role="group"
      aria-label="Score by token"
      onKeyDown=${moving({ row: 0, column: at }, ({ column }) => move(column), 1, values.length)}
    >
      <${Chips}
        label="Tokens by score"
        active=${at}
        onPick=${move}
        items=${values.map((value, n) => ({
          key: n,
          word: words[n],
          value: value ?? undefined,
          share: value === null || (n === 0 && values.length > 1) ? null : (value - middle) / reach,
          generated: n >= prompt,
        }))}
      />
      <p class="note" role="status">
        ${quoted(words[at])} (token ${at}): ${values[at] === null ? "not read" : short(values[at])}
      </p>
      <${Plot}
        title=${title}
        about=${about}
        name=${name}
        rows=${
          rows || values.map((score, n) => ({ token: n, text: words[n], generated: n >= prompt, score }))
        }
        at=${at}
        onAt=${move}
        height=${220}
        bare
        x=${{ low: -0.5, high: values.length - 0.5, label: "token" }}
        y=${{ low, high, label: what }}
        rules=${rules}
        bands=${[
          ...(prompt < values.length
            ? [{ axis: "x", from: prompt - 0.5, to: values.length, tone: "generated", text: "generated" }]
            : []),
          ...bands,
        ]}
        series=${[
          {
            kind: "line",
            name: lines.length ? what : "",
            points: values.map((value, n) => ({ x: n, y: within(value), tip: tip(n) })),
          },
          ...lines.map((line) => ({
            ...line,
            points: line.points.map((point) => ({ ...point, y: within(point.y) })),
          })),
        ]}
      />
      <${Legend}
        from=${middle - reach}
        to=${middle + reach}
        what=${`${what}${rules.length ? "; the threshold is in the middle" : ""}`}
      />
    </div>
  `;
}
