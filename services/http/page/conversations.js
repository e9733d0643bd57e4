// The list of conversations, and which of them is open.

import { isBusy, isEdited, onChange, show } from "./chat.js";
import { $, make, setText } from "./dom.js";
import { loadAll, remove, save } from "./store.js";

const OPEN = "penstock-open"; // of this tab: the id of its conversation
const others = new BroadcastChannel("penstock-conversations"); // other tabs of this browser
const lastOpen = sessionStorage.getItem(OPEN);
let all = [];
let current = null;

const begin = () => ({ id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", changed: 0, turns: [] });

function open(conversation) {
  current = conversation;
  sessionStorage.setItem(OPEN, conversation.id);
  show(conversation);
  showList();
}

function showList() {
  const items = all.map((one) => {
    const choose = make("button", { type: "button", className: "choose", title: one.title }, one.title);
    if (one === current) choose.setAttribute("aria-current", "true");
    choose.addEventListener("click", () => {
      if (one !== current) open(one);
      if (isDrawer.matches) setListOpen(false);
      $("prompt").focus();
    });
    const erase = make("button", { type: "button", className: "delete", ariaLabel: `Delete ${one.title}` }, "×");
    erase.addEventListener("click", () => confirm(`Delete “${one.title}”?`) && forget(one));
    return make("li", {}, choose, erase);
  });
  $("conversation-list").replaceChildren(...items);
}

async function forget(conversation) {
  all = all.filter((one) => one !== conversation);
  if (conversation === current) open(all[0] ?? begin());
  else showList();
  await kept(remove(conversation.id));
  others.postMessage({});
}

/** Waits for a change of the store; says it where the browser refuses. */
async function kept(change) {
  try {
    await change;
    setText($("storage-note"), "");
  } catch (error) {
    setText($("storage-note"), `This browser does not keep conversations: ${error.message}`);
  }
}

onChange((conversation) => {
  if (conversation !== current && !all.includes(conversation)) return; // it was deleted
  conversation.changed = Date.now();
  const isFirst = all[0] === conversation && $("conversation-list").firstChild?.textContent.startsWith(conversation.title);
  all = [conversation, ...all.filter((one) => one !== conversation)];
  if (!isFirst) showList();
  const isWhole = !isBusy();
  kept(save(conversation)).then(() => others.postMessage({ whole: isWhole ? conversation.id : null }));
});

/** Shows what another tab has changed; the open conversation as well, if its answer is whole and nothing is lost. */
others.addEventListener("message", async ({ data }) => {
  const loaded = await loadAll().catch(() => null);
  if (!loaded) return;
  const newer = loaded.find((one) => one.id === current.id);
  const isReplaced = newer && data.whole === current.id && !isBusy() && !isEdited();
  all = loaded.map((one) => (one === newer && !isReplaced ? current : one));
  if (isReplaced) open(newer);
  else showList();
});

$("new").addEventListener("click", () => {
  open(begin());
  $("prompt").focus();
});

// ---- the list as a drawer ----

const isDrawer = matchMedia("(max-width: 1500px)");

function setListOpen(isOpen) {
  $("conversations").hidden = !isOpen;
  $("list-toggle").setAttribute("aria-expanded", isOpen);
}
$("list-toggle").addEventListener("click", () => setListOpen($("conversations").hidden));
$("conversations").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !isDrawer.matches || isBusy()) return;
  setListOpen(false);
  $("list-toggle").focus();
});
isDrawer.addEventListener("change", () => setListOpen(!isDrawer.matches));

/** Opens what this tab had open before a reload, otherwise a new conversation. */
export async function restore() {
  setListOpen(!isDrawer.matches);
  open(begin());
  const unstarted = current;
  await kept(loadAll().then((loaded) => { all = [...all, ...loaded]; }));
  if (current !== unstarted || current.turns.length) showList();
  else open(all.find((one) => one.id === lastOpen) ?? current);
}
