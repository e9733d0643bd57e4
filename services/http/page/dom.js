// Small helpers for elements and numbers.

export const $ = (id) => document.getElementById(id);
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const format = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });

/** Returns a new element with children; `fields` are properties. */
export function make(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // screen readers repeat what is set
}

/** Puts a text on the clipboard; returns false where a page may not, as on plain HTTP. */
export async function copyText(text) {
  return navigator.clipboard?.writeText(text).then(() => true, () => false) ?? false;
}
