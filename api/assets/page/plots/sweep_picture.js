// A picture of a grid's heatmaps.

import { shareOf } from "../lib/grid.js";
import { hookTitle } from "../lib/hooks.js";
import { Heatmap, drawScale } from "../lib/heatmap.js";
import { pngOf } from "./save.js";

const [PANEL, GAP, HEAD, FOOT, LINE, RATIO] = [420, 16, 46, 44, 14, 2];

/** All hooks side by side on white, with title and scale: a promise of a PNG. */
export function picture(grid, pair, title) {
  const ink = () => "rgb(20,20,20)";
  const panels = grid.hooks.map((hook) => {
    const source = { rows: grid.names(pair), columns: grid.layers, titles: grid.titles, scale: () => "", at: (row, column) => shareOf(grid, pair, hook, column, row), ink };
    const map = new Heatmap(document.createElement("canvas"), source, PANEL, { ratio: RATIO, schedule: (draw) => draw(), dark: false });
    return { hook, map };
  });
  const width = Math.max(480, panels.reduce((sum, { map }) => sum + map.width + GAP, GAP));
  const height = HEAD + Math.max(...panels.map(({ map }) => map.height)) + FOOT;
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
  for (const { hook, map } of panels) {
    context.fillText(hookTitle(hook), left + map.left, 8 + 1.5 * LINE);
    context.drawImage(map.canvas, left, HEAD, map.width, map.height);
    map.close();
    left += map.width + GAP;
  }
  const { ends: [low, high], text } = grid.legend(pair);
  const noise = grid.noise(pair);
  const below = height - FOOT + 12;
  context.fillText(low, GAP, below);
  drawScale(context, GAP + 50, below, 160, 10, false);
  context.fillStyle = ink();
  context.fillText(`${high}   ${text.replace("neutral", "white")}; hatched: no value${noise ? `; noise ${noise.text}` : ""}`, GAP + 220, below, width - GAP - 230);
  return pngOf(canvas);
}
