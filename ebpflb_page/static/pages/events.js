// SPDX-License-Identifier: Apache-2.0
// `ebpflb monitor`: the newest events first. Watching begins with a click, as it changes which
// programs are in force.

import { Refused, stream } from "../api.js";
import { Table, el, field, setText } from "../dom.js";

const MOST = 200;

export const title = () => "Events";

const named = (...parts) => parts.filter(Boolean).join(" ");

const COLUMNS = [
  { label: "Time", cell: (it) => it.time.slice(11, 23) },
  { label: "Verdict", cell: (it) => it.verdict },
  { label: "Hook", cell: (it) => named(it.hook, it.device) },
  { label: "Client", cell: (it) => named(it.client, it.pod, it.process && `${it.process} (${it.pid})`) },
  { label: "Service", cell: (it) => it.service },
  { label: "Frontend", cell: (it) => named(it.frontend, it.protocol) },
  { label: "Backend", cell: (it) => named(it.backend, it.backend_pod) },
  { label: "ns", number: true, cell: (it) => it.ns },
];

export const show = (body, { query, signal, tell, news }) => {
  let rows = [], count = 0, watching = null;
  const input = (name, placeholder) => el("input", { name, placeholder, maxlength: 200, value: query.get(name) ?? "" });
  const service = input("service", "default/web, or all"), client = input("client", "10.244.1.0/24, or all");
  const verdict = input("verdict", "refused, or the usual");
  const button = el("button", { id: "watch" }, "Watch");
  const state = el("p", { id: "watching", class: "quiet" }, "nobody watches here");
  const table = new Table("Events, the newest first, in UTC", COLUMNS);
  table.node.setAttribute("role", "log");
  table.node.setAttribute("aria-live", "off");
  const each = (found) => {
    if (found.error) tell(new Error(found.error));
    for (const it of found.events) rows.unshift({ ...it, number: count++ });
    rows = rows.slice(0, MOST);
    if (found.events.length) table.show(rows, (it) => String(it.number));
    const lost = `${found.lost} lost, ${found.left_out} left out as too many`;
    setText(state, found.begun ? `watching: ${count} events, ${lost}` : "the agent loads the programs that tell events");
  };
  const end = () => {
    watching?.abort();
    watching = null;
    setText(button, "Watch");
  };
  const watch = async () => {
    const own = watching = new AbortController();
    rows = [];
    count = 0;
    table.show(rows, () => "");
    setText(button, "Stop");
    tell(null);
    const given = Object.fromEntries([["service", service], ["client", client], ["verdict", verdict]]
      .map(([name, it]) => [name, it.value.trim()]).filter(([, it]) => it));
    try {
      await stream("events", given, each, AbortSignal.any([own.signal, signal]));
    } catch (error) {
      if (!own.signal.aborted && !signal.aborted || error instanceof Refused) tell(error);
    }
    if (watching === own) end();
    if (!signal.aborted) news("nobody watches any more");
  };
  body.append(
    el("p", { class: "quiet" }, "While somebody watches, the agent has programs in force that tell what they decide; afterwards the usual ones again."),
    el("form", { onsubmit: (event) => { event.preventDefault(); if (watching) end(); else watch(); } },
      field("Service", service), field("Client", client), field("Verdict", verdict), button),
    state, table.node);
};
