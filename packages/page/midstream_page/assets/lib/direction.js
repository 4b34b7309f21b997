// A direction from two lists of texts: the difference of their rows' means at one layer (Turner et al.
// 2023; Marks and Tegmark 2023).

import { ApiError, del, post } from "./api.js";
import { ended } from "./readings.js";
import { rowsOf, vector } from "./tensors.js";

export const MOST = 64; // texts of a list

export const linesOf = (text) =>
  text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

/** The mean of [tokens × width] rows without the first, an outlier in most models, if there are others. */
export function mean({ shape: [tokens, width], values }) {
  const from = tokens > 1 ? 1 : 0;
  return Array.from({ length: width }, (_, at) => {
    let sum = 0;
    for (let token = from; token < tokens; token += 1) sum += values[token * width + at];
    return sum / (tokens - from);
  });
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const centre = (rows) => rows[0].map((_, at) => sum(rows.map((row) => row[at])) / rows.length);
const dot = (a, b) => sum(a.map((value, at) => value * b[at]));

/**
 * From means of texts: the direction, and each text's component along it, from the middle of both
 * lists' means.
 */
export function difference(positive, negative) {
  const [towards, away] = [centre(positive), centre(negative)];
  const values = towards.map((value, at) => value - away[at]);
  const norm = Math.sqrt(dot(values, values));
  if (!(norm > 0))
    throw new ApiError(0, {
      detail: "the rows of both lists have the same mean, so there is no direction between them",
    });
  const unit = values.map((value) => value / norm);
  const middle = (dot(towards, unit) + dot(away, unit)) / 2;
  const along = (rows) => rows.map((row) => dot(row, unit) - middle);
  return { values, norm, positive: along(positive), negative: along(negative) };
}

/**
 * Captures the rows of both lists, and returns the direction as an entry of a request's `steering`
 * (all tokens but the first, on which much attention rests), with what `difference` found.
 * `said(text)`: what is under way.
 */
export async function direction({ model, layer, positive, negative, signal, said }) {
  const texts = [...positive, ...negative];
  const { id } = await post(
    "/v1/jobs",
    {
      model,
      prompts: texts,
      sampling: { max_tokens: 0 },
      metadata: { name: "Texts for a direction" },
      capture: { layers: layer, positions: "all_prompt", tag: "direction" },
    },
    { signal },
  );
  const view = await ended(id, {
    signal,
    onView: ({ state }) => said(`capturing ${texts.length} texts: ${state} …`),
  });
  if (view.state !== "succeeded")
    throw new ApiError(0, {
      detail: `the capture is ${view.state}${view.error ? `: ${view.error.detail}` : ""}`,
    });
  const means = [];
  for (let request = 0; request < texts.length; request += 1) {
    said(`reading rows: ${request + 1} of ${texts.length} …`);
    means.push(mean((await rowsOf(id, { request, layer, signal }))[`post_block.${layer}`]));
  }
  await del(`/v1/captures/${id}`, { signal }); // it was for the direction alone
  const found = difference(means.slice(0, positive.length), means.slice(positive.length));
  return {
    ...found,
    entry: { layers: layer, positions: { start: 1 }, norm_match: true, vector: vector(found.values) },
  };
}
