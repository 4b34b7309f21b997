// Pictures of heatmaps.

import { shareOf } from "../lib/grid.js";
import { hookTitle } from "../lib/hooks.js";
import { Heatmap, colour, drawScale } from "../lib/heatmap.js";
import { pngOf } from "./save.js";

const [PANEL, GAP, HEAD, FOOT, LINE, RATIO] = [420, 16, 46, 44, 14, 2];

/** All hooks side by side, with title and scale. */
export function picture(grid, pair, title) {
  const { ends, text } = grid.legend(pair);
  const noise = grid.noise(pair);
  const panels = grid.hooks.map((hook) => ({
    name: hookTitle(hook),
    source: {
      rows: grid.names(pair),
      columns: grid.layers,
      titles: grid.titles,
      at: (row, column) => shareOf(grid, pair, hook, column, row),
    },
  }));
  return maps(
    panels,
    title,
    ends,
    `${text.replace("neutral", "white")}; hatched: no value${noise ? `; noise ${noise.text}` : ""}`,
  );
}

/**
 * Maps of `panels` ([{name, source: as of a Heatmap}]) side by side on white: a promise of a PNG.
 * `ends`: of the scale, which begins at share `from`.
 */
export function maps(panels, title, ends, text, { width: wide = PANEL, paint = colour, from = -1 } = {}) {
  const ink = () => "rgb(20,20,20)";
  const drawn = panels.map(({ name, source }) => ({
    name,
    map: new Heatmap(document.createElement("canvas"), { scale: () => "", ink, paint, ...source }, wide, {
      ratio: RATIO,
      schedule: (draw) => draw(),
      dark: false,
    }),
  }));
  const width = Math.max(
    480,
    drawn.reduce((sum, { map }) => sum + map.width + GAP, GAP),
  );
  const height = HEAD + Math.max(...drawn.map(({ map }) => map.height)) + FOOT;
  const canvas = document.createElement("canvas");
  canvas.width = width * RATIO;
  canvas.height = height * RATIO;
  const context = canvas.getContext("2d");
  context.scale(RATIO, RATIO);
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.fillStyle = ink();
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText(title, GAP, 8, width - 2 * GAP);
  let left = GAP;
  for (const { name, map } of drawn) {
    context.fillText(name, left + map.left, 8 + 1.5 * LINE);
    context.drawImage(map.canvas, left, HEAD, map.width, map.height);
    map.close();
    left += map.width + GAP;
  }
  const below = height - FOOT + 12;
  context.fillText(ends[0], GAP, below);
  drawScale(context, GAP + 50, below, 160, 10, false, paint, from);
  context.fillStyle = ink();
  context.fillText(`${ends[1]}   ${text}`, GAP + 220, below, width - GAP - 230);
  return pngOf(canvas);
}
