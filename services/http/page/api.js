// Requests to this server, with its API key.

import { $, setText } from "./dom.js";

const KEY = "penstock-api-key";
let apiKey = sessionStorage.getItem(KEY) ?? "";
let keyDialog = null;

/** Opens the dialog for the API key, once for all requests that lack it; returns whether it was given. */
function askForKey() {
  keyDialog ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (apiKey) setText($("key-reason"), "The server did not accept this API key.");
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      keyDialog = null;
      if (dialog.returnValue === "given") {
        apiKey = $("key").value;
        sessionStorage.setItem(KEY, apiKey);
      }
      resolve(dialog.returnValue === "given");
    }, { once: true });
  });
  return keyDialog;
}

/** Returns the response; a refusal raises an error with the server's sentence. */
export async function request(path, options = {}) {
  const key = apiKey;
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
  if (response.status === 401 && (key !== apiKey || (await askForKey()))) return request(path, options);
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message ?? `${response.status} ${response.statusText}`);
}

/** Returns what went wrong; fetch has one word, TypeError, for every broken connection. */
export function sentence(error) {
  if (error.name === "TimeoutError") return "The server does not answer.";
  return error instanceof TypeError ? "The connection to the server broke." : error.message;
}

/** Yields the chunks of a stream of server-sent events; a stream without its end mark is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The stream broke off before its end.");
    const parts = (held + value).split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
