// A figure: axes, lines, dots and bars, a reading of the point at the pointer or reached by arrow
// keys, and files of it.

import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { short } from "../lib/chips.js";
import { moving } from "../lib/readings.js";
import { SaveAs } from "./save.js";

const [TOP, RIGHT, BOTTOM, DIGIT] = [24, 16, 40, 7.2]; // pixels
const [APART, NEAR] = [48, 40]; // between two ticks of the x axis; from the pointer to a point that it reads
const [TIP, KEY] = [240, 18]; // the width of a tip; the height of a row of keys
const LINE = 14; // the height of a point's text
const AROUND = [8, 24, 48, 80, 120, 170].flatMap((far) => [
  [far, 0],
  [-far, 0],
  ...[-1, 1].flatMap((side) => [
    [far / 2, side * far],
    [-far / 2, side * far],
    [far, (side * far) / 2],
    [-far, (side * far) / 2],
  ]),
]); // where it may begin, nearest first
const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px system-ui, sans-serif"; // as in app.css

/** Round numbers from `low` to `high`, at most about `many`. */
export function ticks(low, high, many) {
  const unit = 10 ** Math.floor(Math.log10((high - low) / many));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit * many >= (high - low) * 0.999);
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, n) =>
    Number(((Math.ceil(low / step - 1e-9) + n) * step).toPrecision(12)),
  );
}

const filling = (each) => `${each.outline ? "outline" : "fill"} ${tone(each)}`;
const tone = (each) => (each.tone ? `tone-${each.tone}` : "tone-1");
const marks = {
  line: (each) => html`<line class=${`line ${tone(each)}`} x2="16" y1="6" y2="6" />`,
  dots: (each) => html`<circle class=${`fill ${tone(each)}`} cx="10" cy="6" r="5" />`,
  bars: (each) => html`<rect class=${filling(each)} x="4" width="12" height="12" />`,
};

/**
 * The names of series (of several), bands and rules, each once, in rows that are `width` wide above
 * the figure: there they lie on nothing.
 */
function keysOf(series, bands, rules, width) {
  const named = series.filter((each) => each.name);
  const all = [
    ...(named.length > 1 ? named.map((each) => ({ text: each.name, mark: marks[each.kind](each) })) : []),
    ...rules.map(({ text, quiet }) => ({
      text,
      mark: html`<line class=${quiet ? "rule quiet" : "rule"} x2="16" y1="6" y2="6" />`,
    })),
    ...bands.map(({ text, tone: of }) => ({
      text,
      mark: html`<rect class=${`band key ${of}`} x="4" width="12" height="12" />`,
    })),
  ].filter(({ text }, n, each) => text && each.findIndex((other) => other.text === text) === n);
  let [x, y] = [0, 0];
  return all.map((each) => {
    const wide = 34 + pen.measureText(each.text).width;
    if (x && x + wide > width) [x, y] = [0, y + KEY];
    x += wide;
    return { ...each, x: x - wide, y };
  });
}

/**
 * Points with a text, each with the `box` that it stands in: the nearest that lies over no point, no
 * other text and no side; without room, none.
 */
function named(points, [left, top, right, bottom]) {
  const taken = points.map(({ x, y }) => [x - 5, y - 5, x + 5, y + 5]);
  return points
    .filter(({ text }) => text)
    .flatMap((point) => {
      const wide = pen.measureText(point.text).width;
      const boxes = AROUND.map(([across, down]) => [
        point.x + (across < 0 ? across - wide : across),
        point.y + down - LINE / 2,
      ]).map(([x, y]) => [x, y, x + wide, y + LINE]);
      const box = boxes.find(
        ([x, y, to, below]) =>
          x >= left &&
          y >= top &&
          to <= right &&
          below <= bottom &&
          taken.every((other) => x > other[2] || to < other[0] || y > other[3] || below < other[1]),
      );
      if (box) taken.push(box);
      return box ? [{ ...point, box }] : [];
    });
}

/** The axis with both bounds: those it has, else those of the values with some room. */
function bounded(axis, values) {
  const known = values.filter(Number.isFinite);
  const [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  const room = (most - least || Math.abs(most) || 1) * 0.05;
  return { text: short, label: "", ...axis, low: axis.low ?? least - room, high: axis.high ?? most + room };
}

/**
 * `x`, `y`: {label, low, high, text(value), ticks: [[value, text], …]}, of which all may be left out.
 * `series`: [{name, kind: "line", "dots" or "bars", points: [{x, y, tip, tone}], tone, quiet}]; a
 * bar's points have `to`, its right side, and `from`, its base; those of an `outline` are not filled,
 * where they lie on others; a quiet series is not read. `bands`:
 * [{axis, from, to, tone, text}]; `rules`: [{axis, at, text}], across the figure. `rows`: records
 * behind it. `at`, `onAt`: the point read in the first series, if a view keeps it. `bare`: it lies in
 * a card. `about`: what a file of it says beside title and note.
 */
export function Plot({
  title,
  note,
  about,
  name,
  x: across = {},
  y: up = {},
  series,
  bands = [],
  rules = [],
  rows,
  height = 240,
  at,
  onAt,
  square = false,
  bare = false,
}) {
  const frame = useRef(null);
  const [width, setWidth] = useState(0);
  const [own, setOwn] = useState(null);
  useEffect(() => {
    const watch = new ResizeObserver(([{ contentRect }]) => setWidth(Math.floor(contentRect.width)));
    watch.observe(frame.current);
    return () => watch.disconnect();
  }, []);
  const points = series.flatMap((each) => each.points);
  const of = (axis) => rules.filter((rule) => rule.axis === axis).map((rule) => rule.at);
  const x = bounded(across, [...points.flatMap((point) => [point.x, point.to]), ...of("x")]);
  const y = bounded(up, [...points.flatMap((point) => [point.y, point.from]), ...of("y")]);
  const keys = keysOf(series, bands, rules, width);
  const top = TOP + (keys.length ? keys[keys.length - 1].y + KEY : 0);
  const tall = (square ? Math.min(width || height, 420) : height) + top - TOP;
  const yTicks =
    y.ticks ||
    ticks(y.low, y.high, Math.max(2, Math.floor((tall - top - BOTTOM) / 30))).map((value) => [
      value,
      y.text(value),
    ]);
  const left = Math.max(28, ...yTicks.map(([, text]) => String(text).length * DIGIT + 10));
  const px = (value) => left + ((value - x.low) / (x.high - x.low)) * (width - left - RIGHT);
  const py = (value) => top + (1 - (value - y.low) / (y.high - y.low)) * (tall - top - BOTTOM);
  const xTicks =
    x.ticks ||
    ticks(x.low, x.high, Math.max(2, Math.floor((width - left) / APART))).map((value) => [
      value,
      x.text(value),
    ]);
  const read = series.filter((each) => !each.quiet && each.points.length);
  const here = at !== undefined && at !== null ? { row: 0, column: at } : own;
  const point =
    here && read[here.row] && read[here.row].points[Math.min(here.column, read[here.row].points.length - 1)];
  const move = (place) => {
    setOwn(place);
    if (onAt && place && place.row === 0) onAt(place.column);
  };
  const middle = (each) => px(each.to === undefined ? each.x : (each.x + each.to) / 2);
  const nearest = (event) => {
    const box = frame.current.getBoundingClientRect();
    let best = { far: NEAR };
    read.forEach((each, row) =>
      each.points.forEach((candidate, column) => {
        const dx = Math.abs(middle(candidate) - (event.clientX - box.left));
        const far =
          each.kind === "bars"
            ? dx * 0.9
            : Math.hypot(dx, onAt ? 0 : py(candidate.y) - (event.clientY - box.top));
        if (far < best.far) best = { far, row, column };
      }),
    );
    if (best.row !== undefined) move({ row: best.row, column: best.column });
  };
  const band = ({ axis, from, to, tone: of }) => {
    const [a, b] =
      axis === "x"
        ? [px(Math.max(x.low, from)), px(Math.min(x.high, to))]
        : [py(Math.min(y.high, to)), py(Math.max(y.low, from))];
    const box =
      axis === "x"
        ? { x: a, width: Math.max(0, b - a), y: top, height: tall - top - BOTTOM }
        : { y: a, height: Math.max(0, b - a), x: left, width: width - left - RIGHT };
    return html`<rect class=${`band ${of || ""}`} ...${box} />`;
  };
  const rule = ({ axis, at: place, quiet }) => html`
    <line
      class=${quiet ? "rule quiet" : "rule"}
      ...${
        axis === "x"
          ? { x1: px(place), x2: px(place), y1: top, y2: tall - BOTTOM }
          : { x1: left, x2: width - RIGHT, y1: py(place), y2: py(place) }
      }
    />
  `;
  const drawn = {
    line: (each) => html`
      <polyline
        class=${`line ${tone(each)}${each.quiet ? " quiet" : ""}`}
        points=${each.points
          .filter(({ y: value }) => value !== null)
          .map((p) => `${px(p.x).toFixed(1)},${py(p.y).toFixed(1)}`)
          .join(" ")}
      />
      ${
        each.points.length <= 80 &&
        !each.quiet &&
        each.points
          .filter(({ y: value }) => value !== null)
          .map(
            (p) =>
              html`<circle class=${`dot ${tone(p.tone ? p : each)}`} cx=${px(p.x)} cy=${py(p.y)} r="3" />`,
          )
      }
    `,
    dots: (each) =>
      each.points.map(
        (p) => html`
          <circle class=${`dot ${tone(p.tone ? p : each)}`} cx=${px(p.x)} cy=${py(p.y)} r=${each.size || 4} />
        `,
      ),
    bars: (each) =>
      each.points.map(
        (p) => html`
          <rect
            class=${filling(each)}
            x=${px(p.x) + 0.5}
            width=${Math.max(1, px(p.to) - px(p.x) - 1)}
            y=${py(p.y)}
            height=${Math.max(0, py(p.from || 0) - py(p.y))}
          />
        `,
      ),
  };
  return html`
    <figure class=${`chart plot${bare ? "" : " card"}`} aria-label=${title}>
      <figcaption><span>${title}${note && html` <small>${note}</small>`}</span></figcaption>
      <div
        class="plot-frame"
        ref=${frame}
        tabindex="0"
        role="group"
        aria-label=${`${title}. Arrow keys move over its points.`}
        onKeyDown=${
          read.length > 0 &&
          moving(
            here || { row: 0, column: -1 },
            move,
            read.length,
            Math.max(...read.map((each) => each.points.length)),
          )
        }
        onPointerMove=${nearest}
        onPointerDown=${nearest}
        onPointerLeave=${() => setOwn(null)}
      >
        ${
          width > 0 &&
          html`
            <svg
              width=${width}
              height=${tall}
              viewBox=${`0 0 ${width} ${tall}`}
              role="img"
              aria-label=${[`${title}${note ? `: ${note}` : ""}`, ...keys.map(({ text }) => text)].join(", ")}
            >
              ${keys.map(
                ({ x: at, y: down, text, mark }) => html`
                  <g transform=${`translate(${at} ${down})`}>${mark}<text x="20" y="10">${text}</text></g>
                `,
              )}
              ${bands.map(band)}
              ${yTicks.map(
                ([value, text]) => html`
                  <line class="axis" x1=${left} x2=${width - RIGHT} y1=${py(value)} y2=${py(value)} />
                  <text x=${left - 6} y=${py(value) + 4} text-anchor="end">${text}</text>
                `,
              )}
              ${xTicks.map(
                ([value, text]) => html`
                  <line
                    class="axis"
                    x1=${px(value)}
                    x2=${px(value)}
                    y1=${tall - BOTTOM}
                    y2=${tall - BOTTOM + 4}
                  />
                  <text x=${px(value)} y=${tall - BOTTOM + 17} text-anchor="middle">${text}</text>
                `,
              )}
              <text class="label" x=${left} y=${top - 12}>${y.label}</text>
              <text class="label" x=${width - RIGHT} y=${tall - 5} text-anchor="end">${x.label}</text>
              ${rules.map(rule)}
              ${series.map((each) => drawn[each.kind](each))}
              ${named(
                points.map((p) => ({ ...p, x: px(p.x), y: py(p.y) })),
                [left, top, width - RIGHT, tall - BOTTOM],
              ).map(
                ({ x: at, y: down, box: [from, above, to], text }) => html`
                  <line
                    class="leader"
                    x1=${at}
                    y1=${down}
                    x2=${Math.max(from, Math.min(to, at))}
                    y2=${above + LINE / 2}
                  />
                  <text x=${from} y=${above + LINE - 4}>${text}</text>
                `,
              )}
              ${
                point &&
                point.y !== null &&
                html`<circle class="cursor-dot" cx=${middle(point)} cy=${py(point.y)} r="6.5" />`
              }
            </svg>
          `
        }
        ${
          point &&
          own &&
          html`
            <div
              class="tip"
              aria-hidden="true"
              style=${{
                left: `${Math.max(0, Math.min(middle(point) + 12, width - TIP))}px`,
                top: `${py(point.y ?? y.low) + 12}px`,
              }}
            >
              ${point.tip}
            </div>
          `
        }
      </div>
      <p class="visually-hidden" role="status">${point && own ? point.tip : ""}</p>
      ${
        rows &&
        html`
          <${SaveAs}
            name=${name}
            title=${title}
            about=${[note, about].filter(Boolean).join(" · ")}
            figure=${() => frame.current.querySelector("svg")}
            rows=${rows}
          />
        `
      }
    </figure>
  `;
}
