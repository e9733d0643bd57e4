// Prometheus's text format, and what it says about the time between two scrapes. No browser needed.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const PREFIX = "penstock:";

/** Returns name → [{labels, value}] of the samples. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : line.match(SAMPLE);
    if (!match) continue;
    const [, name, labels, value] = match;
    const pairs = [...(labels ?? "").matchAll(LABEL)].map(([, key, text]) => [key, unescaped(text)]);
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: Object.fromEntries(pairs), value: numberOf(value) });
  }
  return samples;
}

const unescaped = (text) => text.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
const numberOf = (text) => (text.endsWith("Inf") ? (text.startsWith("-") ? -Infinity : Infinity) : Number(text));
const valuesOf = (samples, name) => (samples.get(PREFIX + name) ?? []).map(({ value }) => value);
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Returns [upper bound, number of values up to it] of a histogram, summed over its labels. */
function bucketsOf(samples, name) {
  const buckets = new Map();
  for (const { labels, value } of samples.get(`${PREFIX}${name}_bucket`) ?? []) {
    const bound = numberOf(labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + value);
  }
  return [...buckets].sort(([one], [other]) => one - other);
}

/** Returns a quantile of the values that a histogram gained, as Prometheus estimates it; null without any. */
export function quantile(before, after, name, share) {
  const old = new Map(bucketsOf(before, name));
  const gained = bucketsOf(after, name).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const total = gained.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  const index = gained.findIndex(([, count]) => count >= rank);
  const [low, below] = index > 0 ? gained[index - 1] : [0, 0];
  const [high, count] = gained[index];
  return high === Infinity ? low : low + ((high - low) * (rank - below)) / (count - below);
}

/** Returns what the plots show of the seconds between two scrapes. Rates are null after a restart. */
export function pointOf(before, after, seconds) {
  const rate = (name) => {
    const grown = sum(valuesOf(after, name)) - sum(valuesOf(before, name));
    return grown < 0 ? null : grown / seconds;
  };
  const spread = (name) => [quantile(before, after, name, 0.5), quantile(before, after, name, 0.95)];
  const usage = valuesOf(after, "kv_cache_usage_perc");
  return {
    tokens: [rate("generation_tokens_total"), rate("prompt_tokens_total")],
    ttft: spread("time_to_first_token_seconds"),
    itl: spread("inter_token_latency_seconds"),
    kv: [usage.length ? sum(usage) / usage.length : null],
    requests: [sum(valuesOf(after, "num_requests_running")), sum(valuesOf(after, "num_requests_waiting"))],
    ended: [rate("request_success_total"), rate("request_failed_total")],
  };
}

/** Returns a round number that isn't smaller, for the end of an axis. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
