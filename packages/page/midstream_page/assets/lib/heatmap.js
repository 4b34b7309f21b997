// A heatmap on a canvas: rows of tokens, columns of layers. Whatever the rate of updates, it is drawn
// once per animation frame.

import { isDark, onTheme } from "./theme.js";

/**
 * ColorBrewer's RdBu, reversed: blue below, neutral in the middle, red above; told apart by people
 * who are blind to some colours. On a dark page the middle is dark and the ends are bright, so that a
 * map in which little happens does not glare.
 */
const STOPS = {
  light: [
    [5, 48, 97],
    [33, 102, 172],
    [67, 147, 195],
    [146, 197, 222],
    [209, 229, 240],
    [247, 247, 247],
    [253, 219, 199],
    [244, 165, 130],
    [214, 96, 77],
    [178, 24, 43],
    [103, 0, 31],
  ],
  dark: [
    [176, 216, 255],
    [112, 180, 246],
    [66, 138, 212],
    [43, 99, 157],
    [36, 66, 97],
    [37, 47, 52],
    [88, 50, 48],
    [143, 60, 54],
    [205, 81, 68],
    [244, 134, 110],
    [255, 200, 180],
  ],
};

/** `share` from −1 to 1, cut off there. */
export function colour(share, dark = isDark()) {
  return between(STOPS[dark ? "dark" : "light"], (Math.max(-1, share) + 1) / 2);
}

/** The colour at `part` (from 0 to 1) of the way along `stops`. */
function between(stops, part) {
  const at = Math.min(1, part) * (stops.length - 1);
  const below = Math.min(Math.floor(at), stops.length - 2);
  const parts = stops[below].map((low, n) => Math.round(low + (stops[below + 1][n] - low) * (at - below)));
  return `rgb(${parts.join(",")})`;
}

/**
 * From the ground of a cell to teal: for shares from 0 to 1 that have no other side, such as
 * probabilities.
 */
const SHADES = {
  light: [
    [243, 247, 247],
    [191, 226, 226],
    [112, 184, 187],
    [28, 128, 134],
    [6, 72, 80],
  ],
  dark: [
    [30, 40, 44],
    [24, 74, 80],
    [23, 115, 121],
    [63, 166, 168],
    [160, 232, 228],
  ],
};

/** `share` from 0 to 1, cut off there. */
export const shade = (share, dark = isDark()) => between(SHADES[dark ? "dark" : "light"], Math.max(0, share));

const channel = (part) =>
  part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;

/** Black or white, whichever is read better on `rgb(r,g,b)`: at least 4.5 to 1. */
export function inkOn(rgb) {
  const [r, g, b] = rgb.match(/\d+/g).map((part) => channel(Number(part)));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

const LABELS = 132; // CSS pixels for the tokens
const TITLE = 16; // and for the title of each axis
const AXIS = 20 + TITLE; // and for the layers' numbers
const ROW = [0.25, 20]; // least and greatest height of a row
const HEIGHT = 640; // of all rows, where that leaves them ROW[1]
const CELL = [0.25, 26];
const TEXT = 46; // least width of a cell with text
const FONT = 12;
const MEASURED = 1000; // names
const MOST = 16000; // device pixels of a canvas that browsers draw

export class Heatmap {
  /**
   * `source`: {rows: names of tokens, columns: names of layers, at(row, column) → share from −1 to 1,
   * NaN: no value, null: not there yet, scale() → text that changes when all shares do, titles: of
   * the rows' axis and of the columns', widest: CSS pixels of a cell, text(row, column) → what wide
   * cells say, paint: share → colour}. `dark`: colours that do not follow the page's.
   */
  constructor(
    canvas,
    source,
    width,
    {
      ratio = globalThis.devicePixelRatio || 1,
      schedule = (draw) => requestAnimationFrame(draw),
      dark = null,
    } = {},
  ) {
    this.canvas = canvas;
    this.schedule = schedule;
    this.frames = 0; // drawn
    this.drawn = 0; // cells
    this.dirty = new Set();
    this.all = false;
    this.pending = false;
    this.closed = false;
    this.ratio = ratio;
    this.fixed = dark; // null: as the page is
    this.unwatch = onTheme(() => this.markAll());
    this.show(source, width);
  }

  /** Another source, or another width in CSS pixels. */
  show(source, width) {
    this.source = source;
    const [rows, columns] = [source.rows.length, source.columns.length];
    this.context = this.canvas.getContext("2d");
    this.context.font = `${FONT}px system-ui, sans-serif`;
    const widest = source.rows
      .slice(0, MEASURED)
      .reduce((most, name) => Math.max(most, this.context.measureText(name).width), 16);
    this.left = TITLE + Math.min(LABELS, widest + 8, Math.max(24, width / 3 - TITLE));
    this.cell = Math.min(source.widest || CELL[1], Math.max(CELL[0], (width - this.left - 2) / columns));
    this.row = Math.min(ROW[1], Math.max(ROW[0], HEIGHT / rows));
    this.width = Math.ceil(this.left + this.cell * columns + 2);
    this.height = Math.ceil(this.row * rows + AXIS);
    const ratio = Math.min(this.ratio, MOST / this.height, MOST / this.width);
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.markAll();
  }

  mark(row, column) {
    this.dirty.add(row * this.source.columns.length + column);
    this.soon();
  }

  markAll() {
    this.all = true;
    this.soon();
  }

  soon() {
    if (this.pending || this.closed) return;
    this.pending = true;
    this.schedule(() => {
      this.pending = false;
      if (!this.closed) this.draw();
    });
  }

  draw() {
    const scale = this.source.scale();
    const columns = this.source.columns.length;
    this.frames += 1;
    if (this.all || scale !== this.scale) {
      this.context.clearRect(0, 0, this.width, this.height);
      this.drawLabels();
      for (let row = 0; row < this.source.rows.length; row += 1)
        for (let column = 0; column < columns; column += 1) this.drawCell(row, column);
    } else {
      for (const index of this.dirty) this.drawCell(Math.floor(index / columns), index % columns);
    }
    this.scale = scale;
    this.all = false;
    this.dirty.clear();
  }

  /** {left, top, width, height} of a cell, or of a rectangle of cells, in CSS pixels of the canvas. */
  box(row, column, rows = 1, columns = 1) {
    return {
      left: this.left + column * this.cell,
      top: row * this.row,
      width: columns * this.cell,
      height: rows * this.row,
    };
  }

  /** The cell at a point of the canvas in CSS pixels; null: none is there. */
  hit(x, y) {
    const [row, column] = [Math.floor(y / this.row), Math.floor((x - this.left) / this.cell)];
    return row >= 0 && column >= 0 && row < this.source.rows.length && column < this.source.columns.length
      ? { row, column }
      : null;
  }

  drawCell(row, column) {
    const { context } = this;
    const share = this.source.at(row, column);
    const { left, top, width, height } = this.box(row, column);
    const gap = width > 5 && height > 5 ? 0.5 : 0;
    context.clearRect(left, top, width, height);
    this.drawn += 1;
    const [x, y, w, h] = [left + gap, top + gap, width - 2 * gap, height - 2 * gap];
    if (share === null) {
      context.fillStyle = this.ink(0.35); // a dot, unlike the white of a cell in which nothing changes
      if (w > 5 && h > 5) context.fillRect(x + w / 2 - 1, y + h / 2 - 1, 2, 2);
    } else if (Number.isNaN(share)) {
      context.fillStyle = this.style("--cell-none");
      context.fillRect(x, y, w, h);
      context.save();
      context.beginPath();
      context.rect(x, y, w, h);
      context.clip();
      context.strokeStyle = this.style("--cell-hatch");
      context.lineWidth = 1;
      context.beginPath();
      for (let from = -h; from < w; from += 5) {
        context.moveTo(x + from, y + h);
        context.lineTo(x + from + h, y);
      }
      context.stroke();
      context.restore();
    } else {
      const ground = (this.source.paint || colour)(share, this.fixed ?? isDark());
      context.fillStyle = ground;
      context.fillRect(x, y, w, h);
      if (!this.source.text || w < TEXT || h < FONT) return;
      context.font = `${FONT - 1}px system-ui, sans-serif`;
      [context.fillStyle, context.textAlign, context.textBaseline] = [inkOn(ground), "center", "middle"];
      context.fillText(this.source.text(row, column), x + w / 2, y + h / 2 + 0.5);
    }
  }

  /** The text's colour, more or less transparent. */
  ink(alpha) {
    const text = this.source.ink ? this.source.ink() : getComputedStyle(this.canvas).color;
    const parts = text.match(/\d+(\.\d+)?/g) || [0, 0, 0];
    return `rgba(${parts.slice(0, 3).join(",")},${alpha})`;
  }

  drawLabels() {
    const { context, source } = this;
    context.font = `${FONT}px system-ui, sans-serif`;
    context.fillStyle = this.ink(1);
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.max(1, Math.ceil((FONT + 1) / this.row));
    for (let row = 0; row < source.rows.length; row += every) {
      let text = source.rows[row];
      while (text.length > 3 && context.measureText(text).width > this.left - TITLE - 6)
        text = `${text.slice(0, -2)}…`;
      context.fillText(text, this.left - 5, (row + 0.5) * this.row);
    }
    context.textAlign = "center";
    const widest = Math.max(...source.columns.map((name) => String(name).length)) * 8 + 6;
    const step = Math.max(1, Math.ceil(widest / this.cell));
    for (let column = 0; column < source.columns.length; column += step) {
      context.fillText(
        String(source.columns[column]),
        this.left + (column + 0.5) * this.cell,
        source.rows.length * this.row + 11,
      );
    }
    const [rows, columns] = source.titles || ["token", "layer"];
    context.fillStyle = this.ink(0.75);
    context.fillText(columns, (this.left + this.width) / 2, this.height - TITLE / 2);
    context.save();
    context.translate(TITLE / 2 - 1, (source.rows.length * this.row) / 2);
    context.rotate(-Math.PI / 2);
    if (source.rows.length * this.row > context.measureText(rows).width) context.fillText(rows, 0, 0);
    context.restore();
  }

  /** A colour of the page's palette, which is `light-dark(one, other)`. */
  style(name) {
    const parts = getComputedStyle(document.documentElement)
      .getPropertyValue(name)
      .match(/#[0-9a-f]+/gi);
    return parts[(this.fixed ?? isDark()) ? 1 : 0];
  }

  close() {
    this.closed = true;
    this.unwatch();
  }
}

/** A colour bar from −1 (or `from`) to 1 at (x, y) of a context. */
export function drawScale(context, x, y, width, height, dark = isDark(), paint = colour, from = -1) {
  for (let at = 0; at < width; at += 1) {
    context.fillStyle = paint(from + (at / (width - 1)) * (1 - from), dark);
    context.fillRect(x + at, y, 1, height);
  }
}
