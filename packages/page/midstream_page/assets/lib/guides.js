// What each view of readings shows, drawn with an example and said in a sentence: beside the form
// until something was read.

import { html } from "./ui.js";
import { colour, inkOn, shade } from "./heatmap.js";
import { useDark } from "./theme.js";

const [WIDTH, HEIGHT] = [320, 132];

/** A grid of cells with words: `rows` is [[word, share], …]; null: a head, without a ground. */
const cells = (rows, dark, paint = shade) => {
  const [width, height] = [WIDTH / rows[0].length, HEIGHT / rows.length];
  return rows.flatMap((row, y) =>
    row.map(
      ([word, share], x) => html`
        ${
          share !== null &&
          html`
            <rect
              x=${x * width + 1}
              y=${y * height + 1}
              width=${width - 2}
              height=${height - 2}
              rx="3"
              fill=${paint(share, dark)}
            />
          `
        }
        <text
          x=${(x + 0.5) * width}
          y=${(y + 0.5) * height + 4}
          text-anchor="middle"
          style=${share === null ? {} : { fill: inkOn(paint(share, dark)) }}
        >
          ${word}
        </text>
      `,
    ),
  );
};

const WORDS = ["The", "Eiffel", "Tower", "is", "in"];
const LAYERS = [
  ["first", "Tower", "is", "located", "Paris"],
  ["first", "Tower", "is", "in", "Paris"],
  ["same", "Tower", "was", "a", "France"],
  ["the", "lit", "height", "not", "the"],
];
const SURE = [
  [0.2, 0.9, 0.5, 0.6, 0.95],
  [0.2, 0.8, 0.4, 0.5, 0.7],
  [0.1, 0.5, 0.3, 0.2, 0.35],
  [0.05, 0.1, 0.1, 0.05, 0.1],
];
const SEEN = [0.05, 0.7, 0.85, 0.1, 0.15];
const SCORES = [0.1, 0.15, 0.3, 0.25, 0.45, 0.75, 0.6, 0.85, 0.8];

/** View → what it draws, and how to read that. */
const GUIDES = {
  lens: {
    draw: (dark) =>
      cells(
        [
          WORDS.map((word) => [word, null]),
          ...LAYERS.map((row, y) => row.map((word, x) => [word, SURE[y][x]])),
        ],
        dark,
      ),
    text:
      "A column for each token, a row for each layer, the last one at the top. A cell is the word " +
      "that the layer would say next; the darker, the surer. Where a column stops changing, the " +
      "model has its answer.",
  },
  attention: {
    draw: (dark) =>
      cells(
        Array.from({ length: 8 }, (_, query) =>
          Array.from({ length: 8 }, (_, key) => [
            "",
            key > query ? 0 : key === query - 1 ? 0.8 : key === 0 ? 0.5 : 0.06,
          ]),
        ),
        dark,
      ),
    text:
      "A picture for each head: rows are the tokens that look, columns the tokens that they look at. " +
      "A diagonal is a head that looks one token back, a column at the left one that rests on the " +
      "first token.",
  },
  features: {
    draw: (dark) => cells([WORDS.map((word, n) => [word, SEEN[n]])], dark, colour),
    text:
      "The text, shaded by how strongly a feature of the autoencoder is active at each token, and " +
      "the list of the strongest features. Choose a feature to shade the text by it.",
  },
  probes: {
    draw: () => html`
      <line class="threshold" x1="0" x2=${WIDTH} y1="60" y2="60" />
      <polyline
        class="line"
        points=${SCORES.map(
          (score, n) => `${(n * WIDTH) / (SCORES.length - 1)},${HEIGHT - 6 - score * (HEIGHT - 16)}`,
        ).join(" ")}
      />
    `,
    text:
      "A score for each token of the prompt and of the answer, as shaded text and as a line with the " +
      "probe's threshold: where it is crossed, the probe says yes.",
  },
  policies: {
    draw: () => GUIDES.probes.draw(),
    text:
      "The score that the policy reads at each token, with its thresholds: where the line reaches " +
      "the upper one, the policy turns on and acts; where it falls below the lower one, it turns " +
      "off.",
  },
};

export function Guide({ of }) {
  const dark = useDark();
  return html`
    <section class="card guide" aria-label="What it shows">
      <h2>What it shows</h2>
      <svg class="line-chart chart" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} aria-hidden="true">
        ${GUIDES[of.split("/")[0]].draw(dark)}
      </svg>
      <p>${GUIDES[of.split("/")[0]].text}</p>
    </section>
  `;
}
