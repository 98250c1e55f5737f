// SPDX-License-Identifier: Apache-2.0
// A bar for a share, bars of endpoints, a line without axes, and a graph with a value under the
// pointer. Colours are classes: the page's policy allows no style in attributes.

import { el, setText, svg } from "./dom.js";
import { percent, rate, span } from "./words.js";

const WIDTH = 120, HEIGHT = 28;

const drawing = (label, width, height, attributes, ...children) =>
  svg("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height, ...attributes }, ...children);

// `mark`: the place of a mark, such as the expected share.
export const bar = (share, label, mark = null) => drawing(label, 100, 8, { class: "share", preserveAspectRatio: "none" },
  svg("rect", { class: "empty", width: 100, height: 8 }),
  svg("rect", { class: "fill", width: (Math.min(1, share) * 100).toFixed(1), height: 8 }),
  mark != null && svg("path", { class: "mark", d: `M${(Math.min(1, mark) * 98 + 1).toFixed(1)} 0V8` }));

// `ages`: seconds, the oldest first; without them values are at equal distances.
const path = (values, most, width, height, ages) => {
  const all = ages[0] - ages.at(-1), x = (at) => width * (all > 0 ? (ages[0] - ages[at]) / all : at / Math.max(1, values.length - 1));
  return values.map((value, at) => `${at ? "L" : "M"}${x(at).toFixed(1)} ${(height - 1 - (value / most) * (height - 3)).toFixed(1)}`).join("");
};

// A line as wide as its place; the caller shows its highest value beside it.
export const spark = (values, label, width = WIDTH, height = HEIGHT, ages = []) => {
  const most = Math.max(...values, 1e-9);
  const line = values.length > 1 ? path(values, most, width, height, ages) : "";
  return drawing(label, width, height, { class: "spark", preserveAspectRatio: "none" },
    svg("path", { class: "base", d: `M0 ${height - .5}H${width}` }),
    line && svg("path", { class: "area", d: `${line}L${width} ${height}L0 ${height}Z` }),
    line && svg("path", { class: "line", d: line }));
};

// Endpoint rates -> each endpoint's part of its port's connections, in a fixed order, and the part
// that is expected. Ports without connections are left out.
export const partsOf = (endpoints) => {
  const list = (it) => `${it.port} ${it.endpoint.startsWith("[")}`, totals = new Map();
  for (const it of endpoints) totals.set(list(it), (totals.get(list(it)) ?? 0) + it.new);
  return endpoints.filter((it) => totals.get(list(it)) && (it.new || it.share != null)).map((it) => ({
    key: `${it.port} ${it.endpoint}`, name: it.pod || it.endpoint, part: it.new / totals.get(list(it)), expected: it.share ?? 0,
  }));
};

export const parts = (rows, label) => {
  const most = Math.max(...rows.flatMap((it) => [it.part, it.expected]), 1e-9) * 1.1;
  const width = Math.min(14, WIDTH / rows.length), y = (part) => HEIGHT - 1 - (part / most) * (HEIGHT - 2);
  return drawing(label, WIDTH, HEIGHT, { class: "parts" },
    svg("path", { class: "base", d: `M0 ${HEIGHT - .5}H${WIDTH}` }),
    rows.map((it, at) => svg("rect", { class: "fill", x: (at * width).toFixed(1), y: y(it.part).toFixed(1), width: (width * .8).toFixed(1), height: (HEIGHT - 1 - y(it.part)).toFixed(1) })),
    rows.map((it, at) => svg("path", { class: "mark", d: `M${(at * width - .5).toFixed(1)} ${y(it.expected).toFixed(1)}h${(width * .8 + 1).toFixed(1)}` })));
};

export const partsLabel = (rows) =>
  rows.map((it) => `${it.name} ${percent(it.part)}, expected ${percent(it.expected)}`).join("; ");

const TALL = 180, LEFT = 44, BELOW = 22, REFUSED = "refused";

const colour = (line, number) => (line.name === REFUSED ? "refused" : `c${number}`);

// The next round number: its half is one too.
const above = (value) => {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].map((it) => it * power).find((it) => it >= value);
};

// Lines as wide as the page. The pointer, or an arrow key, chooses the time whose values the legend
// has; without one these are the newest.
export class Graph {
  constructor(title) {
    this.drawing = svg("svg", { role: "img", tabindex: 0, class: "graph", height: TALL });
    this.when = el("span", { class: "quiet" });
    this.legend = el("ul", { class: "legend" });
    this.node = el("figure", {}, el("figcaption", {}, el("b", {}, title), " ", this.when), this.drawing, this.legend);
    this.found = { ages: [], lines: [] };
    this.chosen = null;
    this.drawing.addEventListener("pointermove", (event) => this.#choose(this.#at(event)));
    this.drawing.addEventListener("pointerleave", () => this.#choose(null));
    this.drawing.addEventListener("blur", () => this.#choose(null));
    this.drawing.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) this.#choose(Math.max(0, Math.min(this.found.ages.length - 1, (this.chosen ?? this.found.ages.length - 1) + by)));
    });
    new ResizeObserver(() => this.#draw()).observe(this.node);
  }

  show(found) {
    this.found = found;
    if (this.chosen != null && this.chosen >= found.ages.length) this.chosen = null;
    this.#draw();
  }

  #x(age) {
    const longest = Math.max(60, ...this.found.ages);
    return LEFT + (1 - age / longest) * (this.width - LEFT - 4);
  }

  #at(event) {
    const x = event.clientX - this.drawing.getBoundingClientRect().left;
    const distances = this.found.ages.map((age) => Math.abs(this.#x(age) - x));
    return distances.length ? distances.indexOf(Math.min(...distances)) : null;
  }

  #choose(at) {
    this.chosen = at;
    this.#draw();
  }

  #draw() {
    this.width = Math.max(200, this.node.clientWidth);
    const { ages, lines } = this.found, most = above(Math.max(...lines.flatMap((it) => it.values), 1));
    const y = (value) => TALL - BELOW - (value / most) * (TALL - BELOW - 8);
    const longest = Math.max(60, ...ages);
    const at = this.chosen ?? ages.length - 1;
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${TALL}`);
    this.drawing.setAttribute("width", this.width);
    this.drawing.setAttribute("aria-label", `${this.node.querySelector("b").textContent}: ${lines.map((it) => `${it.name} ${rate(it.values[at] ?? 0)}`).join(", ") || "not measured yet"}`);
    this.drawing.replaceChildren(
      ...[0, most / 2, most].flatMap((value) => [
        svg("path", { class: "grid", d: `M${LEFT} ${y(value).toFixed(1)}H${this.width}` }),
        svg("text", { class: "tick end", x: LEFT - 6, y: (y(value) + 4).toFixed(1) }, rate(value)),
      ]),
      svg("text", { class: "tick", x: LEFT, y: TALL - 5 }, `${span(longest)} ago`),
      svg("text", { class: "tick end", x: this.width - 4, y: TALL - 5 }, "now"),
      ...lines.map((it, number) => svg("path", {
        class: `line ${colour(it, number)}`,
        d: it.values.map((value, point) => `${point ? "L" : "M"}${this.#x(ages[point]).toFixed(1)} ${y(value).toFixed(1)}`).join(""),
      })),
      ...(this.chosen == null ? [] : [svg("path", { class: "cursor", d: `M${this.#x(ages[at]).toFixed(1)} 4V${TALL - BELOW}` })]),
    );
    const time = this.chosen == null ? "now" : `${Math.round(ages[at])} s ago`;
    setText(this.when, !ages.length ? "not measured yet" : lines.length ? time : `none in the last ${span(longest)}`);
    this.legend.replaceChildren(...lines.map((it, number) =>
      el("li", { class: colour(it, number) }, `${it.name} `, el("b", {}, rate(it.values[at] ?? 0)))));
  }
}
