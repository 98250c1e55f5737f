// SPDX-License-Identifier: Apache-2.0
// Services with their current rates: `ebpflb services list`, and rates.py.

import { get } from "../api.js";
import { parts, partsLabel, partsOf, spark } from "../charts.js";
import { el, field, problem, select, serviceLink, setOptions, setText } from "../dom.js";
import { live } from "../live.js";
import { Table } from "../table.js";
import { rate, span } from "../words.js";

const STEP = 100, MOST_BARS = 40;

export const title = () => "Services";

const byEndpoint = (it) => {
  const rows = partsOf(it.rates?.endpoints ?? []).slice(0, MOST_BARS);
  return rows.length ? parts(rows, `by endpoint of ${it.service} in the last minute: ${partsLabel(rows)}`) : "";
};

const lastMinute = (it) => {
  const line = it.rates?.line ?? [];
  return line.some((each) => each) ? spark(line, `new connections a second of ${it.service}, highest ${rate(Math.max(...line))}`) : "";
};

const measured = (it, value) => (it.rates?.line.length ? rate(value) : "");

const COLUMNS = [
  { label: "Service", sort: "service", order: "ascending", cell: (it) => serviceLink(it.service) },
  { label: "Addresses", minor: true, name: "addresses", cell: (it) => el("span", { title: [...it.addresses, ...it.ports].join(" ") }, `${it.addresses.join(" ")} `, el("small", {}, it.ports.join(" "))) },
  { label: "Endpoints", sort: "endpoints", order: "ascending", number: true, cell: (it) => (it.unused ? `${it.used} of ${it.used + it.unused}` : it.used) },
  { label: "Open", sort: "open", order: "descending", number: true, minor: true, cell: (it) => it.open ?? "?" },
  { label: "New/s", sort: "new", order: "descending", number: true, cell: (it) => measured(it, it.rates?.new) },
  { label: "Refused/s", sort: "refused", order: "descending", number: true, cell: (it) => measured(it, it.rates?.refused) },
  { label: "Last minute", minor: true, name: "drawn", cell: lastMinute },
  { label: "By endpoint", minor: true, name: "drawn", cell: byEndpoint },
  { label: "Problem", sort: "problems", order: "descending", name: "why", cell: (it) => problem([...new Set(it.problems)].join("; ")) },
];

export const show = (body, { query, signal, tell }) => {
  let limit = STEP, sort = query.get("sort") ?? "problems", isReverse = query.has("reverse"), waiting = 0;
  const match = el("input", { type: "search", name: "match", value: query.get("match") ?? "", maxlength: 200, placeholder: "name, address or port" });
  const namespace = select("namespace", [["", "all"], ...[query.get("namespace")].filter(Boolean).map((it) => [it])], query.get("namespace") ?? "");
  const only = el("input", { type: "checkbox", name: "problems", checked: query.has("problems") });
  const more = el("button", { type: "button", hidden: true, onclick: () => { limit += STEP; again(); } });
  const notes = el("p", { class: "quiet" });
  const table = new Table("Services of this node", COLUMNS, { name: "services", onsort: (word) => { isReverse = word === sort && !isReverse; sort = word; again(); } });
  const given = () => Object.fromEntries([["match", match.value.trim()], ["namespace", namespace.value], ["sort", sort], ["reverse", isReverse ? "1" : ""], ["problems", only.checked ? "1" : ""]].filter(([, it]) => it));
  const read = async () => {
    const asked = given(), found = await get("services", { ...asked, limit }, signal);
    if (JSON.stringify(asked) !== JSON.stringify(given())) return;
    setOptions(namespace, [["", "all"], ...found.list.namespaces.map((it) => [it])]);
    table.sorted(sort, isReverse);
    table.show(found.list.services.map((it) => ({ ...it, rates: found.rates.services[it.service] })), (it) => it.service);
    more.hidden = !found.list.more;
    setText(more, `Show more: ${found.list.more} are not shown`);
    const fit = found.list.services.length + found.list.more;
    setText(notes, [`${fit} of ${found.list.total} Services`, ...found.list.notes, found.age > 10 ? `as of ${span(found.age)} ago` : ""].filter(Boolean).join("; "));
  };
  const again = () => {
    history.replaceState(null, "", `#/services?${new URLSearchParams(given())}`);
    read().then(() => tell(null)).catch((error) => signal.aborted || tell(error));
  };
  match.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(again, 150);
  });
  namespace.addEventListener("change", again);
  only.addEventListener("change", again);
  body.append(
    el("form", { role: "search", onsubmit: (event) => event.preventDefault() },
      field("Filter", match), field("Namespace", namespace), el("label", { class: "check" }, only, "Only those with a problem"), notes),
    table.node, more);
  live(read, signal, tell);
};
