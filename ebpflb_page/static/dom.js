// SPDX-License-Identifier: Apache-2.0
// Nodes of the document. Text goes into text nodes only, so data never becomes markup.

const SVG = "http://www.w3.org/2000/svg";

const grown = (made, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((it) => it != null && it !== false));
  return made;
};

export const el = (tag, attributes = {}, ...children) =>
  grown(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  grown(document.createElementNS(SVG, tag), attributes, children);

export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const field = (label, ...inputs) => el("label", {}, el("span", {}, label), ...inputs);

export const select = (name, options, chosen) =>
  el("select", { name }, options.map(([value, label]) => el("option", { value, selected: value === chosen }, label ?? value)));

export const setOptions = (node, options) => {
  const chosen = node.value;
  node.replaceChildren(...options.map(([value, label]) => el("option", { value, selected: value === chosen }, label ?? value)));
};

// An input with suggestions, which `suggest(values)` replaces.
export const suggested = (name, attributes = {}) => {
  const list = el("datalist", { id: `list-${name}` });
  const input = el("input", { name, list: list.id, maxlength: 200, spellcheck: "false", autocomplete: "off", ...attributes });
  const suggest = (values) => list.replaceChildren(...values.map((value) => el("option", { value })));
  return { input, list, suggest };
};

// NAMESPACE/NAME: a line breaks behind the slash first, and the namespace is shortened first.
export const serviceName = (name) => {
  const at = name.indexOf("/") + 1;
  return [el("span", { class: "namespace quiet" }, name.slice(0, at)), el("wbr"), el("span", { class: "own" }, name.slice(at))];
};

export const serviceLink = (name) =>
  el("a", { href: `#/service/${name.split("/").map(encodeURIComponent).join("/")}`, title: name }, serviceName(name));

// NAMESPACE/NAME:PORT in one line.
export const servicePort = (text) => {
  const [name] = text.split(":"), port = text.slice(name.length);
  return name.includes("/") ? el("span", { class: "service", title: text }, serviceLink(name), el("small", {}, port)) : text;
};

export const problem = (text) => (text ? el("span", { class: "problem", title: text }, text) : "");

// Saves values as a file with a line of JSON for each.
export const save = (name, values) => {
  const text = values.map((it) => `${JSON.stringify(it)}\n`).join("");
  const url = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  el("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
};
