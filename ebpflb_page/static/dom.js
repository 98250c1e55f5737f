// SPDX-License-Identifier: Apache-2.0
// Nodes of the document. Text goes into text nodes only: nothing that is read becomes markup.

const SVG = "http://www.w3.org/2000/svg";

const grown = (made, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((it) => it != null));
  return made;
};

export const el = (tag, attributes = {}, ...children) =>
  grown(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  grown(document.createElementNS(SVG, tag), attributes, children);

export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const field = (label, input) => el("label", {}, label, input);

// A table whose rows stay while their cells change, so focus and selection stay too.
// columns: {label, number, cell(item) -> text or node}
export class Table {
  constructor(caption, columns) {
    this.columns = columns;
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    this.empty = el("p", { class: "quiet" }, "none");
    const head = columns.map((it) =>
      el("th", { role: "columnheader", scope: "col", class: it.number ? "number" : null }, it.label));
    const table = el("table", { class: "cards", role: "table" },
      el("caption", {}, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)), this.body);
    this.node = el("div", { class: "scroll" }, table, this.empty);
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
  }

  #row() {
    return el("tr", { role: "row" }, this.columns.map((it) =>
      el("td", { role: "cell", "data-label": it.label, class: it.number ? "number" : null })));
  }
}

const fill = (cell, content) => {
  if (!(content instanceof Node)) setText(cell, String(content ?? ""));
  else if (!cell.firstChild?.isEqualNode(content) || cell.childNodes.length > 1) cell.replaceChildren(content);
};
