// Prometheus' text format, as far as the status page needs it.

/** @returns {Map<string, {labels: Record<string, string>, value: number}[]>} samples by name */
export function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (match === null) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    }
    const samples = found.get(match[1]) ?? [];
    samples.push({ labels, value: Number(match[3]) });
    found.set(match[1], samples);
  }
  return found;
}

export function sum(metrics, name, wanted = {}) {
  return (metrics.get(name) ?? [])
    .filter(({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value))
    .reduce((total, { value }) => total + value, 0);
}

/** The rate of a counter between two scrapes; a smaller count means that the server began anew. */
export function rate(before, now, seconds, name, wanted = {}) {
  if (before === null || seconds <= 0) return null;
  const change = sum(now, name, wanted) - sum(before, name, wanted);
  return change < 0 ? null : change / seconds;
}

/** The mean of a histogram between two scrapes, or null if nothing was counted. */
export function mean(before, now, name, wanted = {}) {
  if (before === null) return null;
  const items = sum(now, `${name}_count`, wanted) - sum(before, `${name}_count`, wanted);
  const total = sum(now, `${name}_sum`, wanted) - sum(before, `${name}_sum`, wanted);
  return items > 0 ? total / items : null;
}
