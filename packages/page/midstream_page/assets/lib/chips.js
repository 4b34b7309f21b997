// Tokens as coloured chips, and what their colours mean.

import { html } from "./ui.js";
import { colour, inkOn } from "./heatmap.js";
import { useDark } from "./theme.js";

export { inkOn };

/** Blanks and line ends as signs, so that a chip shows where they are. */
export const visible = (word) =>
  word.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "·") || "∅";

/** A number for people: four significant digits. */
export const short = (value) =>
  value === null || value === undefined
    ? "none"
    : Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3)
      ? value.toExponential(2)
      : Number(value.toPrecision(4)).toString();

/** A number beside others in a list: two significant digits, zeros at the end too. */
export const brief = (value) =>
  value === 0 || Math.abs(value) >= 100 ? `${Math.round(value)}` : value.toPrecision(2);

/**
 * `items`: [{key, word, value, share, generated}]: `share` from −1 to 1 is the colour; null or
 * undefined: no colour. `value` is said in the chip's title and, with `values`, below the word, as
 * `text(value)`. `active`: the key of the chip under the cursor. `paint`: share → colour.
 */
export function Chips({
  items,
  label,
  values = false,
  active = null,
  onPick = null,
  paint = colour,
  text = short,
}) {
  const dark = useDark();
  return html`
    <div class="chips" role="group" aria-label=${label}>
      ${items.map(({ key, word, value, share, generated }) => {
        const filled = share !== null && share !== undefined;
        const back = filled ? paint(share, dark) : null;
        return html`
          <span
            key=${key}
            data-position=${key}
            class=${`chip${generated ? " generated" : ""}${filled ? "" : " plain"}${active === key ? " active" : ""}`}
            style=${filled ? { backgroundColor: back, color: inkOn(back) } : {}}
            title=${value === undefined ? null : `${visible(word)}: ${text(value)}`}
            onClick=${onPick ? () => onPick(key) : null}
          >
            ${visible(word)}
            ${values && value !== undefined ? html`<small>${text(value)}</small>` : ""}
          </span>
        `;
      })}
    </div>
  `;
}

/**
 * A colour bar with what its ends and middle stand for, as `text(value)`. `low` −1: from blue over
 * neutral to red; 0: from neutral to red.
 */
export function Legend({ from, to, low = -1, what, paint = colour, text = short }) {
  const dark = useDark();
  const steps = Array.from({ length: 24 }, (_, n) => low + ((1 - low) * n) / 23);
  const first = low < 0 ? "blue" : "neutral";
  const second = paint === colour ? "red" : "teal";
  return html`
    <div class="legend">
      <span>${text(from)}</span>
      <span
        class="legend-bar"
        role="img"
        aria-label=${`${what}: ${first} is ${text(from)}, ${second} is ${text(to)}`}
      >
        ${steps.map((share) => html`<i style=${{ backgroundColor: paint(share, dark) }}></i>`)}
      </span>
      <span>${text(to)}</span> <span class="soft">${what}</span>
    </div>
  `;
}
