// SPDX-License-Identifier: Apache-2.0
// One Service as `ebpflb services get` has it.

import { get } from "../api.js";
import { bar, line, percent, rate } from "../charts.js";
import { Table, el, setText } from "../dom.js";
import { live } from "../live.js";
import { endpoints } from "./services.js";

export const title = (path) => `Service ${path}`;

const explained = (it) => {
  const to = `${it.frontend.replace("0.0.0.0:", "").replace("[::]:", "")}/${it.protocol.toLowerCase()}`;
  return it.kind === "NodePort" ? it.frontend
    : el("a", { href: `#/explain?${new URLSearchParams({ to })}` }, it.frontend);
};

const FRONTENDS = [
  { label: "Port", cell: (it) => it.port },
  { label: "Kind", cell: (it) => it.kind },
  { label: "Frontend", cell: explained },
  { label: "Policy", cell: (it) => it.policy },
  { label: "Endpoints", number: true, cell: (it) => it.endpoints },
  { label: "Problem", cell: (it) => it.problem ? el("span", { class: "problem" }, it.problem) : "" },
];

const share = (value, of) =>
  value == null ? "-" : el("span", {}, `${percent(value)} `, bar(value, `${of}: share ${percent(value)}`));

const ENDPOINTS = [
  { label: "Port", cell: (it) => it.port },
  { label: "Endpoint", cell: (it) => it.endpoint },
  { label: "Pod", cell: (it) => it.pod },
  { label: "Node", cell: (it) => it.node },
  { label: "Share", cell: (it) => share(it.share, it.endpoint) },
  { label: "Local", cell: (it) => it.local_share == null ? `- ${it.not_local}` : percent(it.local_share) },
  { label: "Open", number: true, cell: (it) => it.open ?? "?" },
  { label: "Opened", number: true, cell: (it) => it.opened ?? "?" },
  { label: "New/s", number: true, cell: (it) => it.rate == null ? "" : rate(it.rate) },
];

const UNUSED = [
  { label: "Port", cell: (it) => it.port },
  { label: "Endpoint", cell: (it) => it.endpoint },
  { label: "Pod", cell: (it) => it.pod },
  { label: "Node", cell: (it) => it.node },
  { label: "Why", cell: (it) => it.reason || it.state },
];

const rowsOf = (page, rates) => page.ports.flatMap((port) => {
  const found = new Map(rates.filter((it) => it.service === port.port).map((it) => [it.backend, it.new]));
  return port.endpoints.map((it) => ({ ...it, port: port.port, rate: found.get(it.endpoint) }));
});

const key = (it) => `${it.port} ${it.endpoint ?? it.frontend} ${it.slice ?? ""} ${it.reason ?? ""} ${it.kind ?? ""}`;

export const show = (body, { path, signal, tell }) => {
  let page = 1;
  const problems = el("ul", { class: "problem" }), notes = el("p", { class: "quiet" });
  const now = el("p", { id: "rate" }), minute = el("div");
  const frontends = new Table("Frontends", FRONTENDS);
  const used = new Table("Endpoints", ENDPOINTS), unused = new Table("Not used, and why", UNUSED);
  const turn = (by) => () => { page += by; read().catch(tell); };
  const back = el("button", { type: "button", onclick: turn(-1) }, "Earlier endpoints");
  const on = el("button", { type: "button", onclick: turn(1) }, "More endpoints");
  const where = el("span", { role: "status" });
  const pages = el("p", {}, back, " ", where, " ", on);
  body.append(problems, now, minute, frontends.node, used.node, pages, unused.node, notes);
  const read = async () => {
    const found = await get("service", { name: path, page }, signal);
    const rows = rowsOf(found.page, endpoints(found.rates));
    frontends.show(found.page.ports.flatMap((port) =>
      port.frontends.map((it) => ({ ...it, port: port.port, protocol: port.protocol }))), key);
    used.show(rows.filter((it) => it.state === "used"), key);
    const left = found.page.left_out.map((it) => ({ ...it, reason: `${it.reason} (${it.slice})` }));
    unused.show([...rows.filter((it) => it.state !== "used"), ...left], key);
    problems.replaceChildren(...found.problems.map((it) => el("li", {}, it)));
    setText(notes, found.page.notes.join("; "));
    setText(now, found.rates.line.length ? `${rate(found.rates.new)} new connections a second, ${rate(found.rates.refused)} refused` : "rates are being measured");
    minute.replaceChildren(line(found.rates.line, "new connections a second"));
    pages.hidden = found.pages < 2;
    back.disabled = page < 2;
    on.disabled = page >= found.pages;
    setText(where, `page ${page} of ${found.pages}`);
  };
  live(read, signal, tell);
};
