// SPDX-License-Identifier: Apache-2.0
// A table whose rows stay while their cells change, so focus and selection stay too.

import { el, setText } from "./dom.js";

// columns: {label, cell(item) -> text or node, number, minor, sort, title(item)}
// minor: not on narrow screens; sort: the word for onsort(word) when the heading is chosen, order:
// the order it begins with. In a table "lines" a row is one line; a click or the focus opens it.
export class Table {
  constructor(caption, columns, { name = "", onsort = null, empty = "none" } = {}) {
    this.columns = columns;
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    this.empty = el("p", { class: "quiet" }, "reading");
    this.whenEmpty = empty;
    this.heads = columns.map((it) => el("th", { role: "columnheader", scope: "col", class: classes(it) },
      it.sort ? el("button", { type: "button", class: "sort", onclick: () => onsort(it.sort) }, it.label) : it.label));
    this.head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, this.heads));
    const table = el("table", { class: `rows ${name}`, role: "table" }, el("caption", {}, caption), this.head, this.body);
    this.body.addEventListener("click", (event) =>
      event.target.closest("a, button") ?? event.target.closest("tr").classList.toggle("open"));
    this.node = el("div", { class: "table" }, table, this.empty);
  }

  sorted(word, isReverse) {
    this.columns.forEach((it, at) => {
      const order = isReverse ? OTHER[it.order] : it.order;
      if (it.sort === word) this.heads[at].setAttribute("aria-sort", order);
      else this.heads[at].removeAttribute("aria-sort");
    });
  }

  show(items, key) {
    const kept = new Map();
    items.forEach((item, at) => {
      let name = key(item);
      while (kept.has(name)) name += "'";
      const row = this.rows.get(name) ?? this.#row();
      this.columns.forEach((column, index) => fill(row.children[index], column.cell(item)));
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
      kept.set(name, row);
    });
    for (const [name, row] of this.rows) if (kept.get(name) !== row) row.remove();
    this.rows = kept;
    this.empty.hidden = items.length > 0;
    setText(this.empty, this.whenEmpty);
    this.head.hidden = !items.length && !this.columns.some((it) => it.sort);
  }

  #row() {
    return el("tr", { role: "row" }, this.columns.map((it) =>
      el("td", { role: "cell", "data-label": it.label, class: classes(it) })));
  }
}

const OTHER = { ascending: "descending", descending: "ascending" };

const classes = (it) => [it.number && "number", it.minor && "minor", it.name].filter(Boolean).join(" ") || null;

const fill = (cell, content) => {
  if (content instanceof Node) {
    if (!cell.firstChild?.isEqualNode(content) || cell.childNodes.length > 1) cell.replaceChildren(content);
    return;
  }
  const text = String(content ?? "");
  setText(cell, text);
  if (cell.title !== text) cell.title = text;
};
