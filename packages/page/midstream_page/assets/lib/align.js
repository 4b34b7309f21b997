// Two prompts in one table: a column for each pair of counterparts that the server named, and for each
// token without one.

/** Pairs (clean, corrupt) of a planned pair's columns. */
export function linksOf(pair, patched) {
  const links = [];
  for (const { positions, sources } of pair.columns) {
    positions.forEach((place, index) => {
      if (sources.length) links.push(patched === "clean" ? [place, sources[index]] : [sources[index], place]);
    });
  }
  const known = new Set();
  return links
    .filter(([clean, corrupt]) => !known.has(`${clean}/${corrupt}`) && known.add(`${clean}/${corrupt}`))
    .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

/**
 * Columns [{clean, corrupt, linked}] of token positions, null where there is none. Links in ascending
 * order keep both prompts in reading order; with links that cross, the clean prompt is in reading
 * order and each token of it has its counterpart below.
 */
export function layout(cleanCount, corruptCount, links) {
  const ascending = links.every(
    ([clean, corrupt], n) => n === 0 || (clean > links[n - 1][0] && corrupt > links[n - 1][1]),
  );
  const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, n) => from + n);
  if (!ascending) {
    const below = new Set(links.map(([, corrupt]) => corrupt));
    const columns = range(0, cleanCount).flatMap((clean) => {
      const own = links.filter(([one]) => one === clean);
      return own.length
        ? own.map(([, corrupt]) => ({ clean, corrupt, linked: true }))
        : [{ clean, corrupt: null, linked: false }];
    });
    return [
      ...columns,
      ...range(0, corruptCount)
        .filter((place) => !below.has(place))
        .map((corrupt) => ({ clean: null, corrupt, linked: false })),
    ];
  }
  const columns = [];
  let [clean, corrupt] = [0, 0];
  for (const [toClean, toCorrupt] of [...links, [cleanCount, corruptCount]]) {
    const [above, below] = [range(clean, toClean), range(corrupt, toCorrupt)];
    for (let n = 0; n < Math.max(above.length, below.length); n += 1) {
      columns.push({ clean: above[n] ?? null, corrupt: below[n] ?? null, linked: false });
    }
    if (toClean < cleanCount || toCorrupt < corruptCount)
      columns.push({ clean: toClean, corrupt: toCorrupt, linked: true });
    [clean, corrupt] = [toClean + 1, toCorrupt + 1];
  }
  return columns;
}
