// SPDX-License-Identifier: Apache-2.0
// `ebpflb explain` as a form; the way as a diagram, and the same as a table.

import { get } from "../api.js";
import { bar, percent } from "../charts.js";
import { Table, el, field, svg } from "../dom.js";

const LINE = 18, PAD = 10, GAP = 26, MOST_BRANCHES = 8, LETTER = 7.3;

export const title = () => "Explain";

const STEPS = [
  { label: "Step", cell: (it) => it.step },
  { label: "What", cell: (it) => it.says },
  { label: "Map", cell: (it) => it.map },
  { label: "Row", cell: (it) => it.row },
];

const ENDPOINTS = [
  { label: "Chance", cell: (it) => el("span", {}, `${percent(it.chance)} `, bar(it.chance, `${it.endpoint}: chance ${percent(it.chance)}`)) },
  { label: "Endpoint", cell: (it) => it.endpoint },
  { label: "Pod", cell: (it) => it.pod },
  { label: "Node", cell: (it) => it.node },
  { label: "Zone", cell: (it) => it.zone },
  { label: "Slots", cell: (it) => it.slot },
  { label: "Note", cell: (it) => it.note },
];

const lines = (text, most) => {
  const found = [""];
  for (const word of text.split(" ")) {
    for (let at = 0; at < Math.max(1, word.length); at += most) {
      const part = word.slice(at, at + most), last = found.at(-1);
      if (last && last.length + 1 + part.length > most) found.push(part);
      else found[found.length - 1] = last ? `${last} ${part}` : part;
    }
  }
  return found;
};

const box = (label, text, row, y, width) => {
  const most = Math.floor((width - 2 * PAD) / LETTER);
  const words = lines(text, most), below = row ? lines(row, most) : [];
  const height = 2 * PAD + LINE * (1 + words.length + below.length);
  const all = [[label, "label"], ...words.map((it) => [it, null]), ...below.map((it) => [it, "row"])];
  const node = svg("g", {},
    svg("rect", { class: "box", x: 1, y, width: width - 2, height, rx: 5 }),
    all.map(([it, kind], at) => svg("text", { x: PAD, y: y + PAD + LINE * (at + .8), class: kind }, it)));
  return { node, height };
};

const arrow = (y, width) => [
  svg("path", { class: "way", d: `M${width / 2} ${y}V${y + GAP - 6}` }),
  svg("path", { class: "arrow", d: `M${width / 2 - 5} ${y + GAP - 8}h10l-5 8z` }),
];

// Each endpoint is a branch, as thick as its chance.
const branches = (endpoints, y, width) => {
  const shown = endpoints.slice(0, MOST_BRANCHES);
  const nodes = shown.flatMap((it, at) => {
    const top = y + at * LINE * 1.6, middle = top + LINE * .7;
    const pod = it.pod ? ` (${it.pod})` : "";
    const most = Math.floor((width - 60) / LETTER);
    return [
      svg("path", { class: "way to", d: `M${PAD + 8} ${y - GAP}V${middle}H${PAD + 34}`, "stroke-width": (1 + 6 * it.chance).toFixed(1) }),
      svg("text", { x: PAD + 40, y: middle + 5 }, `${percent(it.chance)} ${it.endpoint}${pod}`.slice(0, most)),
    ];
  });
  const more = endpoints.length > shown.length ? 1 : 0;
  if (more) nodes.push(svg("text", { x: PAD + 40, y: y + shown.length * LINE * 1.6 + LINE }, "more in the table"));
  return { nodes, height: (shown.length + more) * LINE * 1.6 };
};

export const diagram = (found, width) => {
  const nodes = [];
  let y = 1;
  const add = (label, text, row) => {
    const made = box(label, text, row, y, width);
    nodes.push(made.node);
    y += made.height;
  };
  add("client", found.client);
  for (const it of found.steps) {
    nodes.push(...arrow(y, width));
    y += GAP;
    add(it.step, it.says, it.map && `${it.map} ${it.row}`);
    if (it.step === "policy" && found.endpoints.length) {
      const made = branches(found.endpoints, y + GAP, width);
      nodes.push(...made.nodes);
      y += GAP + made.height;
    }
  }
  nodes.push(...arrow(y, width));
  y += GAP;
  add("verdict", `${found.verdict}: ${found.says}`);
  return svg("svg", { role: "img", "aria-labelledby": "way-title", width, height: y + 2, viewBox: `0 0 ${width} ${y + 2}` },
    svg("title", { id: "way-title" }, `The way to ${found.to} in ${found.steps.length} steps, each of which is a row of the table below: ${found.verdict}`),
    nodes);
};

const who = (from) => from.kind === "node" ? "this node"
  : from.address && from.address !== from.name ? `${from.name} (${from.address})` : from.name;

export const show = (body, { query, signal, tell, news }) => {
  const input = (name, attributes = {}) => el("input", { name, maxlength: 200, spellcheck: "false", ...attributes, value: query.get(name) ?? attributes.value ?? "" });
  const to = input("to", { required: true, placeholder: "10.96.0.10:80/tcp" });
  const from = input("from", { value: "node", placeholder: "pod, address, netns, PID, node, outside" });
  const port = input("from_port", { inputmode: "numeric", placeholder: "any", size: 6 });
  const button = el("button", {}, "Explain");
  const answer = el("div", { id: "answer" });
  const read = async () => {
    button.disabled = true;
    answer.replaceChildren(el("p", { class: "quiet" }, "asking the programs"));
    try {
      const given = { to: to.value.trim(), from: from.value.trim() || "node" };
      if (port.value.trim()) given.from_port = port.value.trim();
      const found = await get("explain", given, signal);
      answer.replaceChildren(...shown({ ...found, client: who(found.from) }, body.clientWidth));
      news(`${found.verdict}: ${found.says}`);
      tell(null);
    } catch (error) {
      answer.replaceChildren();
      if (!signal.aborted) tell(error);
    } finally {
      button.disabled = false;
    }
  };
  body.append(
    el("form", { onsubmit: (event) => {
      event.preventDefault();
      const given = { to: to.value.trim(), from: from.value.trim() };
      if (port.value.trim()) given.from_port = port.value.trim();
      history.replaceState(null, "", `#/explain?${new URLSearchParams(given)}`);
      read();
    } },
    field("To: ADDRESS:PORT/PROTOCOL", to), field("From", from), field("From port", port), button),
    el("p", { class: "quiet" }, "Nothing is sent, and nothing changes: the programs that are in force are asked."),
    answer);
  if (to.value) read();
};

const shown = (found, width) => {
  const steps = new Table("Steps, and the row of the map that each comes from", STEPS);
  steps.show(found.steps, (it) => `${it.step} ${it.says}`);
  const parts = [
    el("p", { class: "verdict", id: "explained" }, `${found.verdict}: ${found.says}`),
    el("ul", {}, found.notes.map((it) => el("li", {}, it))),
    diagram(found, Math.max(240, Math.min(640, width))), steps.node,
  ];
  if (found.endpoints.length) {
    const endpoints = new Table("Endpoints, and the chance of a new connection", ENDPOINTS);
    endpoints.show(found.endpoints, (it) => it.endpoint);
    parts.push(endpoints.node);
  }
  if (found.more_endpoints) parts.push(el("p", { class: "quiet" }, `${found.more_endpoints} more endpoints: ebpflb explain --page 2`));
  return parts;
};
