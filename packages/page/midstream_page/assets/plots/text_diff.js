// Two texts with the words that only one of them has marked.

import { html } from "../lib/ui.js";

const MOST = 1500; // words of a text that are compared

/**
 * Words with the blanks before them: [{text, only: "" | "first" | "second"}], by a longest common
 * subsequence; later words as they are.
 */
export function diff(first, second) {
  const [a, b] = [first, second].map((text) => (text.match(/\s*\S+|\s+$/g) || []).slice(0, MOST));
  const width = b.length + 1;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1)
      longest[i * width + j] =
        a[i] === b[j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  }
  const found = [];
  const add = (text, only) =>
    found.length && found[found.length - 1].only === only
      ? (found[found.length - 1].text += text)
      : found.push({ text, only });
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) (add(a[i], ""), (i += 1), (j += 1));
    else if (j === b.length || (i < a.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1]))
      (add(a[i], "first"), (i += 1));
    else (add(b[j], "second"), (j += 1));
  }
  return found;
}

/** One side of `diff`: its text, with what only it has marked. */
export const Side = ({ parts, side }) => html`
  <span class="side">
    ${parts
      .filter(({ only }) => !only || only === side)
      .map(({ text, only }) => (only ? html`<mark class=${side}>${text}</mark>` : text))}
  </span>
`;
