// Functions of the page for a test: each line of the input is {module, name, args}, each line of the
// output the result. Infinity and NaN become texts, a Map its entries.
import { createInterface } from "node:readline";

const modules = {};
const page = new URL("../../../services/http/page/", import.meta.url);
for (const name of ["markdown", "math", "metrics"]) modules[name] = await import(new URL(`${name}.js`, page));

const { parse, reparse } = modules.markdown;
modules.test = {
  /** Whether a text that is received in pieces has the same nodes at each cut as when parsed whole. */
  firstDifference(text, size) {
    let state = null;
    for (let end = 0; end <= text.length + size; end += size) {
      const part = text.slice(0, end);
      state = reparse(state, part);
      if (JSON.stringify(state.nodes) !== JSON.stringify(parse(part))) return part;
    }
    return null;
  },
  quantiles: (before, after, name, shares) => {
    const [old, now] = [before, after].map(modules.metrics.parseMetrics);
    return shares.map((share) => modules.metrics.quantile(old, now, name, share));
  },
  point: (before, after, seconds) => modules.metrics.pointOf(...[before, after].map(modules.metrics.parseMetrics), seconds),
  parseAndCount: (text) => parse(text).length,
};

const plain = (_, value) => (value instanceof Map ? [...value] : typeof value === "number" && !Number.isFinite(value) ? String(value) : value);
for await (const line of createInterface({ input: process.stdin })) {
  const { module, name, args } = JSON.parse(line);
  console.log(JSON.stringify(modules[module][name](...args), plain));
}
