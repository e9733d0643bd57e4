// Settings of requests, which this browser keeps.

import { $, setText } from "./dom.js";

const KEY = "penstock-settings";
const FIELDS = ["system", "tools", "temperature", "max-tokens"];

/** Returns the fields that the settings add to a chat completion; invalid tools raise an error. */
export function requestFields() {
  const [temperature, maxTokens] = [$("temperature").value, $("max-tokens").value];
  const tools = toolsOf($("tools").value.trim());
  return {
    ...($("model-choice").value && { model: $("model-choice").value }),
    ...(tools.length && { tools }),
    ...(temperature && { temperature: Number(temperature) }),
    ...(maxTokens && { max_tokens: Number(maxTokens) }),
    ...(!$("thinking").checked && { chat_template_kwargs: { enable_thinking: false } }),
  };
}

/** Returns OpenAI's form of tools; bare functions and a single one are accepted as well. */
function toolsOf(text) {
  try {
    const tools = text ? [JSON.parse(text)].flat() : [];
    return tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
  } catch (error) {
    throw new Error(`Tools: got invalid JSON, expected a list of functions (${error.message}).`);
  }
}

export const systemPrompt = () => $("system").value.trim();

function keep() {
  const values = FIELDS.map((name) => [name, $(name).value]);
  localStorage.setItem(KEY, JSON.stringify({ ...Object.fromEntries(values), thinking: $("thinking").checked }));
}

function restore() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch { /* SyntaxError: another program wrote it */ }
  for (const name of FIELDS) $(name).value = kept[name] ?? "";
  $("thinking").checked = kept.thinking ?? true;
}

/** Names in the heading of the folded settings what differs from the defaults. */
function showSummary() {
  const labels = { system: "system prompt", tools: "tools", temperature: "temperature", "max-tokens": "max tokens" };
  const names = FIELDS.filter((name) => $(name).value.trim()).map((name) => labels[name]);
  if (!$("thinking").checked) names.push("no thinking");
  setText($("settings").querySelector("summary"), names.length ? `Settings: ${names.join(", ")}` : "Settings");
}

restore();
showSummary();
$("settings").addEventListener("change", () => {
  keep();
  showSummary();
});
