// SPDX-License-Identifier: Apache-2.0
// `ebpflb monitor`, the newest events first. Watching begins with a click, because the agent loads
// other programs for it.

import { Refused, stream } from "../api.js";
import { choice, choices, serviceField } from "../choices.js";
import { el, field, save, select, servicePort, setText } from "../dom.js";
import { Table } from "../table.js";
import { CANARY, clock, colour, rfc3339 } from "../words.js";

const SHOWN = 200, KEPT = 2000;

export const title = () => "Events";

const words = (verdict) => verdict.replaceAll("_", " ");

const named = (...parts) => parts.filter(Boolean).join(" ");

const COLUMNS = [
  { label: "Time", name: "time", cell: (it) => el("time", { title: rfc3339(it.time), datetime: it.time }, clock(it.time)) },
  { label: "Verdict", name: "what", cell: (it) => el("span", { class: colour(it.verdict), title: words(it.verdict) }, words(it.verdict)) },
  { label: "Service", name: "whose", cell: (it) => servicePort(it.service) },
  { label: "Client", name: "client", cell: (it) => el("span", { title: named(it.client, it.pod, it.process, it.pid || "") }, named(it.client, it.pod)) },
  { label: "Frontend", name: "frontend", cell: (it) => (it.frontend ? `${it.frontend}/${it.protocol}` : "") },
  { label: "Endpoint", name: "endpoint", cell: (it) => named(it.backend, it.backend_pod) },
  { label: "Hook", minor: true, name: "hook", cell: (it) => named(it.hook, it.device) },
  { label: "µs", minor: true, number: true, name: "short", cell: (it) => (it.ns / 1000).toFixed(1) },
];

const isCanary = (it) => it.service.startsWith(`${CANARY}:`);

// A table of events with its buttons; the filter is `given()`, or fixed.
export const watching = (given, { signal, tell, news }) => {
  let rows = [], count = 0, watched = null, lost = "";
  const button = el("button", { type: "button", id: "watch", onclick: () => (watched ? end() : watch()) }, "Watch");
  const out = el("button", { type: "button", disabled: true, onclick: () => save("ebpflb-events.jsonl", rows) }, "Save as JSON lines");
  const canaries = el("input", { type: "checkbox", name: "canaries" });
  const state = el("p", { id: "watching", class: "quiet" }, "Not watching. While anyone watches, the agent runs programs that report every decision.");
  const table = new Table("Events, the newest first", COLUMNS, { name: "lines events", empty: "none yet" });
  table.show(rows, () => "");
  table.node.setAttribute("role", "log");
  table.node.setAttribute("aria-live", "off");
  const draw = () => {
    const shown = canaries.checked ? rows : rows.filter((it) => !isCanary(it));
    table.show(shown.slice(0, SHOWN), (it) => String(it.number));
    const folded = canaries.checked ? 0 : rows.length - shown.length;
    setText(state, `${watched ? "watching" : "ended"}: ${count} events${folded ? `, of which ${folded} are the canary's of \`ebpflb doctor\`, not shown` : ""}${lost}`);
    out.disabled = !rows.length;
  };
  const each = (found) => {
    if (found.error) tell(new Error(found.error));
    const added = found.events.map((it) => ({ ...it, number: count++ })).reverse();
    rows = [...added, ...rows].slice(0, KEPT);
    lost = found.lost || found.left_out ? `; ${found.lost} lost, ${found.left_out} left out as too many` : "";
    if (found.begun) draw();
    else setText(state, "the agent is loading the programs that report decisions");
  };
  const end = () => {
    watched?.abort();
    watched = null;
    setText(button, "Watch");
    draw();
  };
  const watch = async () => {
    const own = watched = new AbortController();
    rows = [];
    count = 0;
    table.show(rows, () => "");
    setText(button, "Stop");
    tell(null);
    try {
      await stream("events", typeof given === "function" ? given() : given, each, AbortSignal.any([own.signal, signal]));
    } catch (error) {
      if ((!own.signal.aborted && !signal.aborted) || error instanceof Refused) tell(error);
    }
    if (watched === own) end();
    if (!signal.aborted) news("watching has ended");
  };
  canaries.addEventListener("change", draw);
  return el("div", {}, el("div", { class: "tools" }, button, out, el("label", { class: "check" }, canaries, "Show canaries")), state, table.node);
};

export const show = (body, { query, signal, tell, news }) => {
  const service = serviceField("Service", query.get("service") ?? "", signal);
  const form = el("form", { onsubmit: (event) => event.preventDefault() });
  body.append(form);
  const fill = ({ pods, verdicts }) => {
    const clients = [["", "any"], ...pods.map((it) => [it.addresses[0], `${it.name} (${it.addresses[0]})`])];
    const client = choice("Client", "client", clients, query.get("client") ?? "", "another address or network");
    const verdict = select("verdict", [["", "the usual ones"], ...verdicts.map((it) => [it, words(it)])], query.get("verdict") ?? "");
    form.replaceChildren(service.node, client.node, field("Verdict", verdict));
    const given = () => {
      const found = Object.fromEntries([["service", service.input.value.trim()], ["client", client.current()], ["verdict", verdict.value]].filter(([, it]) => it));
      history.replaceState(null, "", `#/events?${new URLSearchParams(found)}`);
      return found;
    };
    body.append(watching(given, { signal, tell, news }));
  };
  choices(signal).then(fill).catch((error) => {
    if (signal.aborted) return;
    tell(error);
    fill({ pods: [], verdicts: [] });
  });
};
