// Numbers, times and sizes as the page shows them.

export const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

/** Seconds as `12 s`, `3 min`, `2 h 5 min`, `4 d`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 0.1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.round(hours / 24)} d`;
}

/** How long ago a moment (seconds since the epoch) was. */
export function age(moment, now = Date.now() / 1000) {
  if (!moment) return "–";
  const s = Math.max(0, now - moment);
  return s < 10 ? `${Math.floor(s)} s` : duration(s);
}

/** A moment as `14:02:11`; of another day than `now`, as `Nov 28, 14:02`. */
export function clock(moment, now) {
  const at = new Date(moment * 1000);
  const today = at.toDateString() === new Date(now * 1000).toDateString();
  return at.toLocaleString("en", {
    hour12: false,
    hour: "2-digit",
    minute: "2-digit",
    ...(today ? { second: "2-digit" } : { month: "short", day: "numeric" }),
  });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = value;
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export const percent = (share) =>
  share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
/** A share in whole percents would make the rare 0 % and the frequent 100 %. */
export const fine = (share) => {
  const parts = 100 * share;
  return `${parts > 0 && parts < 1 ? parts.toPrecision(2) : parts.toFixed(parts === 0 ? 0 : 2)} %`;
};
/** A moment as `2026-11-28 14:02:11`, as the command line writes it. */
export const time = (moment) => (moment ? new Date(moment * 1000).toLocaleString("sv") : "–");

/** The identity of a model in short, as errors and the command line show it. */
export const identity = (digest) => (digest ? digest.slice(0, 12) : "–");

/** `1 cell`, `1,200 cells`. */
export const count = (many, thing) => `${number(many)} ${thing}${many === 1 ? "" : "s"}`;
