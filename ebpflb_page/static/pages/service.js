// SPDX-License-Identifier: Apache-2.0
// One Service as `ebpflb services get` has it, with its graph, history and events.

import { Final, get } from "../api.js";
import { Graph, bar, partsOf } from "../charts.js";
import { el, problem, setText } from "../dom.js";
import { live } from "../live.js";
import { Table } from "../table.js";
import { percent, rate } from "../words.js";
import { watching } from "./events.js";
import { changesTable, rowsOf as historyRows } from "./history.js";

const CHANGES = 10;

export const title = (path) => path;

const short = (port) => port.slice(port.indexOf(":") + 1);

const FRONTENDS = [
  { label: "Frontend", cell: (it) => el("a", { href: `#/explain?${new URLSearchParams({ service: it.service, to: it.to })}`, title: `explain a connection to ${it.to}` }, it.frontend) },
  { label: "Port", cell: (it) => short(it.port) },
  { label: "Kind", cell: (it) => it.kind },
  { label: "Policy", cell: (it) => it.policy },
  { label: "Endpoints", number: true, cell: (it) => it.endpoints },
  { label: "Problem", name: "why", cell: (it) => problem(it.problem) },
];

const withPort = (it) => el("span", {}, `${it.endpoint} `, it.port && el("small", {}, short(it.port)));

const expected = (share) => (share == null ? "-" : percent(share));

// The endpoint's part of its port's connections, and a mark at the expected part.
const lastMinute = (it) => {
  if (it.part == null) return "";
  const label = `${it.endpoint}: ${percent(it.part)} of the last minute, expected ${expected(it.share)}`;
  return el("span", { class: "with-bar" }, el("span", {}, percent(it.part)), bar(it.part, label, it.share));
};

const ENDPOINTS = [
  { label: "Endpoint", cell: withPort },
  { label: "Pod", cell: (it) => it.pod },
  { label: "Node", minor: true, cell: (it) => it.node },
  { label: "Share", number: true, cell: (it) => expected(it.share) },
  { label: "Local share", minor: true, number: true, cell: (it) => (it.local_share == null ? `-${it.not_local ? ` ${it.not_local}` : ""}` : percent(it.local_share)) },
  { label: "Last minute", cell: lastMinute },
  { label: "Open", number: true, cell: (it) => it.open ?? "?" },
  { label: "Opened", number: true, minor: true, cell: (it) => it.opened ?? "?" },
  { label: "New/s", number: true, minor: true, cell: (it) => (it.rate == null ? "" : rate(it.rate)) },
];

const UNUSED = [
  { label: "Endpoint", cell: withPort },
  { label: "Pod", cell: (it) => it.pod },
  { label: "Node", minor: true, cell: (it) => it.node },
  { label: "Why", cell: (it) => it.reason || it.state },
];

const key = (it) => `${it.port} ${it.endpoint ?? it.frontend} ${it.slice ?? ""} ${it.reason ?? ""} ${it.kind ?? ""}`;

const each = (values) => [...new Set(values)].join(", ");

const affinity = (seconds) => (seconds ? `ClientIP, ${seconds} s` : "none");

const facts = (page) => [
  ["Type", page.type || "unknown: no agent is running"],
  ["Policy", each(page.ports.flatMap((it) => it.frontends.map((row) => `${row.kind} ${row.policy}`)))],
  ["Affinity", each(page.ports.map((it) => affinity(it.affinity_seconds)))],
  ["Scheduler", each(page.ports.map((it) => it.scheduler))],
  ["When an endpoint goes", each(page.ports.map((it) => it.on_removal).filter(Boolean))],
].filter(([, value]) => value);

const frontendsOf = (page) => page.ports.flatMap((port) => port.frontends.map((it) => ({
  ...it, port: port.port, service: page.service, to: `${it.frontend}/${port.protocol.toLowerCase()}`,
})));

const endpointsOf = (page, rates) => {
  const found = new Map(rates.map((it) => [`${it.port} ${it.endpoint}`, it.new]));
  const parts = new Map(partsOf(rates).map((it) => [it.key, it.part]));
  return page.ports.flatMap((port) => port.endpoints.map((it) => {
    const name = `${port.port} ${it.endpoint}`;
    return { ...it, port: port.port, rate: found.get(name), part: parts.get(name) };
  }));
};

export const show = (body, { path, signal, tell, news }) => {
  let page = 1;
  const problems = el("ul", { class: "problem" }), notes = el("p", { class: "quiet" }), about = el("dl", { class: "about wide" });
  const now = el("p", { id: "rate" }), graph = new Graph("New connections a second, by endpoint");
  const frontends = new Table("Frontends; a link explains a connection there", FRONTENDS, { name: "frontends" });
  const used = new Table("Endpoints", ENDPOINTS, { name: "endpoints" }), unused = new Table("Not used, and why", UNUSED, { name: "unused" });
  const turn = (by) => () => { page += by; read().catch(tell); };
  const back = el("button", { type: "button", onclick: turn(-1) }, "Earlier endpoints");
  const on = el("button", { type: "button", onclick: turn(1) }, "More endpoints");
  const where = el("span", { role: "status" });
  const pages = el("p", { hidden: true }, back, " ", where, " ", on);
  const changes = changesTable("Latest changes");
  const events = el("details", {}, el("summary", {}, "Events"), watching({ service: path }, { signal, tell, news }));
  const all = el("p", {}, el("a", { href: `#/history?${new URLSearchParams({ service: path })}` }, "All changes"));
  const found = el("div", { hidden: true }, about, problems, now, graph.node, frontends.node, used.node, pages, unused.node, events, changes.node, all, notes);
  body.append(found);
  const read = async () => {
    const said = await get("service", { name: path, page }, signal);
    found.hidden = false;
    const rows = endpointsOf(said.page, said.rates.endpoints);
    about.replaceChildren(...facts(said.page).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    frontends.show(frontendsOf(said.page), key);
    used.show(rows.filter((it) => it.state === "used"), key);
    const left = said.page.left_out.map((it) => ({ ...it, reason: `${it.reason} (${it.slice})` }));
    const notUsed = [...rows.filter((it) => it.state !== "used"), ...left];
    unused.show(notUsed, key);
    unused.node.hidden = !notUsed.length;
    problems.replaceChildren(...[...new Set(said.problems)].map((it) => el("li", {}, it)));
    setText(notes, said.page.notes.join("; "));
    setText(now, said.rates.line.length ? `${rate(said.rates.new)} new connections a second, ${rate(said.rates.refused)} refused` : "rates are being measured");
    graph.show(said.graph);
    pages.hidden = said.pages < 2;
    back.disabled = page < 2;
    on.disabled = page >= said.pages;
    setText(where, `page ${page} of ${said.pages}`);
  };
  const readChanges = async () => {
    const said = await get("history", { service: path, limit: CHANGES }, signal);
    changes.show(historyRows(said.changes, path), (it) => it.id);
  };
  const gone = new AbortController();
  live(read, signal, (error) => {
    tell(error);
    if (!(error instanceof Final)) return;
    gone.abort();
    body.replaceChildren(el("p", {}, el("a", { href: "#/services" }, "All Services of this node")));
  });
  live(readChanges, AbortSignal.any([signal, gone.signal]), () => {});
};
