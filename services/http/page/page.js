// Entry of the page: its two views and the theme.

import { restore } from "./conversations.js";
import { $ } from "./dom.js";
import { watch } from "./pipeline.js";
import { drawPlots, watchMetrics } from "./plots.js";

// ---- views ----

const tabs = [...document.querySelectorAll('[role="tab"]')];

function select(tab) {
  for (const one of tabs) {
    const isChosen = one === tab;
    one.setAttribute("aria-selected", isChosen);
    one.tabIndex = isChosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isChosen;
  }
  $("list-toggle").hidden = tab.id !== "chat-tab";
  history.replaceState(null, "", tab.id === "chat-tab" ? location.pathname + location.search : "#metrics");
  drawPlots();
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - index];
    select(other);
    other.focus();
  });
});
select(tabs[location.hash === "#metrics" ? 1 : 0]);

// ---- theme ----

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  localStorage.setItem("penstock-theme", theme);
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}
$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});

setTheme(localStorage.getItem("penstock-theme") ?? "auto");
restore();
watch();
watchMetrics();
