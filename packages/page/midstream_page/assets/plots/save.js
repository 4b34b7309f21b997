// Files that the browser makes of a figure and of the records behind it.

import { Button, html, useState, Problem } from "../lib/ui.js";
import { csv } from "../lib/grid.js";

// pixels of a line above a saved figure, and of its signs; device pixels of a PNG
const [LINE, SIGN, RATIO] = [17, 6.6, 2];
const DRAWN = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "opacity",
  "font-size",
  "font-weight",
  "font-family",
  "text-anchor",
];

/** Has the browser save a blob (or a promise of one) under a name. */
export async function save(name, blob) {
  const url = URL.createObjectURL(await blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** What a canvas shows, as a promise of a PNG. */
export const pngOf = (canvas) =>
  new Promise((resolve, reject) =>
    canvas.toBlob(
      (blob) => (blob ? resolve(blob) : reject(new Error("this browser cannot make a PNG of this size"))),
      "image/png",
    ),
  );

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/**
 * The figure by itself, on white with its title and what it is `about`: {text, width, height}. Styles
 * become attributes, since the page's sheet is not in the file.
 */
function alone(figure, title, about = "") {
  const width = figure.width.baseVal.value;
  const lines = [
    ["heading", title, SIGN * 1.3],
    ["label", about, SIGN],
  ].flatMap(([name, text, sign]) =>
    (text.match(new RegExp(`\\S.{0,${Math.floor((width - 16) / sign)}}(?=\\s|$)|\\S+`, "g")) || []).map(
      (line) => [name, line],
    ),
  );
  const head = lines.length * LINE + 7;
  const height = figure.height.baseVal.value + head;
  const copy = figure.cloneNode(true);
  const holder = document.createElement("div");
  holder.className = "chart plot printed"; // in light colours, out of sight
  holder.append(copy);
  document.body.append(holder);
  copy.querySelectorAll(".cursor-dot").forEach((each) => each.remove());
  copy.prepend(
    element("rect", { x: 0, y: -head, width, height, class: "paper" }),
    ...lines.map(([name, line], n) => element("text", { x: 8, y: LINE * (n + 1) - head, class: name }, line)),
  );
  for (const each of copy.querySelectorAll("*")) {
    const style = getComputedStyle(each);
    for (const name of DRAWN) each.setAttribute(name, style.getPropertyValue(name));
    each.removeAttribute("class");
  }
  holder.remove();
  for (const [key, value] of Object.entries({
    xmlns: "http://www.w3.org/2000/svg",
    width,
    height,
    viewBox: `0 ${-head} ${width} ${height}`,
  }))
    copy.setAttribute(key, value);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

async function drawn({ text, width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width * RATIO, height * RATIO];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return pngOf(canvas);
}

const recordsOf = (rows) => (typeof rows === "function" ? rows() : rows);

/**
 * Buttons that save a figure (`figure()`: its svg; `png()`: a promise of a picture where it is none)
 * and its records, or what gives them; `about`: a line below its title.
 */
export function SaveAs({ name, title, about, figure, png, rows }) {
  const [error, setError] = useState(null);
  const files = {
    ...(png || figure ? { PNG: png || (() => drawn(alone(figure(), title, about))) } : {}),
    ...(figure
      ? { SVG: () => new Blob([alone(figure(), title, about).text], { type: "image/svg+xml" }) }
      : {}),
    CSV: () => new Blob([csv(recordsOf(rows))], { type: "text/csv" }),
    JSON: () =>
      new Blob([JSON.stringify({ title, about, rows: recordsOf(rows) })], { type: "application/json" }),
  };
  return html`
    <p class="save-as">
      <span class="soft">Save as</span>
      ${Object.entries(files).map(
        ([kind, make]) => html`
          <${Button}
            key=${kind}
            kind="small quiet"
            aria-label=${`Save ${title} as ${kind}`}
            onClick=${() => save(`${name}.${kind.toLowerCase()}`, make())}
            onError=${setError}
          >
            ${kind}
          <//>
        `,
      )}
      <${Problem} error=${error} />
    </p>
  `;
}
