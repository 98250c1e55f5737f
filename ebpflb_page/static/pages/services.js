// SPDX-License-Identifier: Apache-2.0
// Services with what they do now: `ebpflb services list`, and the rates of `ebpflb top`.

import { get } from "../api.js";
import { bars, line, rate } from "../charts.js";
import { Table, el, field, setText } from "../dom.js";
import { live } from "../live.js";

const STEP = 100, MOST_BARS = 40;

export const title = () => "Services";

export const endpoints = (found) => (found?.ports ?? []).filter((it) => it.backend);

const rates = (found, name) => {
  if (!found?.line.length) return "";
  const of = endpoints(found).slice(0, MOST_BARS);
  const words = of.map((it) => `${it.pod || it.backend} ${rate(it.new)}`).join(", ");
  return bars(of.map((it) => it.new), `endpoints of ${name}, new a second: ${words || "none"}`);
};

const COLUMNS = [
  { label: "Service", cell: (it) => el("a", { href: `#/service/${it.service.split("/").map(encodeURIComponent).join("/")}` }, it.service) },
  { label: "Ports", cell: (it) => it.ports.join(" ") },
  { label: "Addresses", cell: (it) => it.addresses.join(" ") },
  { label: "Endpoints", number: true, cell: (it) => it.unused ? `${it.used} of ${it.used + it.unused}` : it.used },
  { label: "Open", number: true, cell: (it) => it.open ?? "?" },
  { label: "Opened", number: true, cell: (it) => it.opened ?? "?" },
  { label: "New/s", number: true, cell: (it) => it.rates?.line.length ? rate(it.rates.new) : "" },
  { label: "Last minute", cell: (it) => line(it.rates?.line ?? [], `new connections a second of ${it.service}`) },
  { label: "By endpoint", cell: (it) => rates(it.rates, it.service) },
  { label: "Problem", cell: (it) => it.problems.length ? el("span", { class: "problem" }, it.problems.length > 1 ? `${it.problems[0]}, and ${it.problems.length - 1} more` : it.problems[0]) : "" },
];

export const show = (body, { query, signal, tell }) => {
  let limit = STEP;
  const filter = el("input", { type: "search", name: "filter", value: query.get("filter") ?? "", maxlength: 200 });
  const more = el("button", { type: "button", hidden: true, onclick: () => { limit += STEP; read().catch(tell); } });
  const notes = el("p", { class: "quiet" });
  const table = new Table("Services of this node", COLUMNS);
  const form = el("form", { role: "search", onsubmit: (event) => { event.preventDefault(); read().catch(tell); } },
    field("Name contains", filter), el("button", {}, "Filter"));
  body.append(form, table.node, more, notes);
  const read = async () => {
    const text = filter.value.trim();
    const found = await get("services", { match: text.includes("*") ? text : `*${text}*`, limit }, signal);
    const rows = found.list.services.map((it) => ({ ...it, rates: found.rates.services[it.service] }));
    table.show(rows, (it) => it.service);
    more.hidden = !found.list.more;
    setText(more, `Show more: ${found.list.more} are not shown`);
    setText(notes, found.list.notes.join("; "));
  };
  live(read, signal, tell);
};
