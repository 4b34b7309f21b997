// Attention patterns from captured queries and keys, and what each head attends to, as
// client/captures/patterns.py computes them.

/**
 * How much each query attends to each key, by one head: Float64Array [tokens × tokens], row by row.
 * `queries` and `keys`: {shape, values} of positions 0 to n − 1, after norms and rotary; `kind`: the
 * layer's entry of the model's `attention`.
 */
export function pattern(queries, keys, kind, head) {
  const [tokens, width] = queries.shape;
  const size = kind.head_dim;
  const of = keys.shape[1];
  // key heads are shared by groups of query heads
  const shared = Math.floor((head * (of / size)) / kind.heads);
  const found = new Float64Array(tokens * tokens);
  const sink = kind.sinks && kind.sinks.length ? kind.sinks[head] : -Infinity;
  const slope = kind.slopes && kind.slopes.length ? kind.slopes[head] : 0;
  for (let query = 0; query < tokens; query += 1) {
    const from = Math.max(
      kind.window ? query - kind.window + 1 : 0,
      kind.chunk ? query - (query % kind.chunk) : 0,
      0,
    );
    const row = found.subarray(query * tokens, (query + 1) * tokens);
    let most = sink;
    for (let key = from; key <= query; key += 1) {
      let score = 0;
      for (let at = 0; at < size; at += 1)
        score +=
          queries.values[query * width + head * size + at] * keys.values[key * of + shared * size + at];
      score *= kind.scale;
      if (kind.softcap) score = kind.softcap * Math.tanh(score / kind.softcap);
      row[key] = score + slope * (key - query);
      most = Math.max(most, row[key]);
    }
    let total = Math.exp(sink - most);
    for (let key = from; key <= query; key += 1) total += row[key] = Math.exp(row[key] - most);
    for (let key = from; key <= query; key += 1) row[key] /= total;
  }
  return found;
}

/**
 * Behaviour, in short → [what it attends to, its keys for the query at `at`, given the earlier
 * positions of the same token].
 */
const BEHAVIOURS = {
  first: ["the first token", (at) => (at ? [0] : [])],
  previous: ["the previous token", (at) => (at ? [at - 1] : [])],
  current: ["the token itself", (at) => (at ? [at] : [])],
  duplicate: ["earlier occurrences of the token", (at, earlier) => earlier],
  induction: [
    "what followed earlier occurrences of the token",
    (at, earlier) => earlier.map((key) => key + 1).filter((key) => key < at),
  ],
};
// the least share of a behaviour other than attending to the first token, where heads rest
const CLEAR = 0.25;

/** A head's behaviour: {name, what, share: the mean over the queries that have such keys}. */
export function behaviour(found, ids) {
  const tokens = ids.length;
  const earlier = ids.map((id, at) => ids.flatMap((other, key) => (key < at && other === id ? [key] : [])));
  const scores = Object.entries(BEHAVIOURS).map(([name, [what, keysOf]]) => {
    const shares = ids.flatMap((_, at) => {
      const keys = keysOf(at, earlier[at]);
      return keys.length ? [keys.reduce((sum, key) => sum + found[at * tokens + key], 0)] : [];
    });
    return {
      name,
      what,
      share: shares.length ? shares.reduce((sum, share) => sum + share, 0) / shares.length : 0,
    };
  });
  const [first, ...others] = scores;
  const most = others.reduce((a, b) => (b.share > a.share ? b : a));
  return most.share >= CLEAR ? most : first;
}
