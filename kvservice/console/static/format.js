// Numbers and times as people read them.

const COUNT = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const count = (value) => COUNT.format(Math.round(value));

/** [number, unit] of a size. Three digits at most, so that numbers in a column have about the same width. */
export function sizeParts(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return [digits(value, unit === 0), UNITS[unit]];
}

/** A size on an axis, where it is a power of two or a multiple of one: 16 MiB. */
export function roundSize(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${Number(value.toFixed(2))} ${UNITS[unit]}`;
}

export const size = (bytes) => sizeParts(bytes).join(" ");

export const rate = (bytes) => `${size(bytes)}/s`;

/** A count a second: 0.4, 12, 1,234. */
export function perSecond(value) {
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : count(value);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.001) return "<0.1%";
  if (share < 1 && share > 0.999) return ">99.9%";
  return `${(share * 100).toFixed(share === 1 || share === 0 ? 0 : 1)}%`;
}

/** A length of time with one or two units: 340 ms, 12.3 s, 4 min, 3 h 20 min, 2 d 4 h. */
export function span(seconds) {
  if (seconds < 0.001) return `${Math.max(0, seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const ago = (seconds) => (seconds < 1 ? "just now" : `${span(seconds)} ago`);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export const words = (name) => name.replaceAll("_", " ");

function digits(value, whole) {
  if (whole || value >= 100) return value.toFixed(0);
  return value.toFixed(value >= 10 ? 1 : 2);
}
