// SPDX-License-Identifier: Apache-2.0
// `ebpflb history`.

import { get } from "../api.js";
import { serviceField } from "../choices.js";
import { el, field, save, select, servicePort, setText } from "../dom.js";
import { Table } from "../table.js";
import { CANARY, clock, rfc3339 } from "../words.js";

const SINCE = [["", "the beginning"], ["10m", "10 minutes ago"], ["1h", "an hour ago"], ["6h", "6 hours ago"], ["24h", "a day ago"]];
const SIGNS = [["+", "good", "endpoints_added"], ["-", "bad", "endpoints_removed"], ["~", "quiet", "endpoints_changed"], ["+", "good", "frontends_added"], ["-", "bad", "frontends_removed"], ["~", "quiet", "frontends_changed"]];
const SOME = 3, SAVED = 500;

export const title = () => "History";

const cause = (it) => [it.kind, it.version ? `${it.name}@${it.version}` : it.name, it.event].filter(Boolean).join(" ");

const causes = (change) =>
  change.causes.slice(0, SOME).map(cause).join("; ") + (change.more_causes || change.causes.length > SOME ? " and others" : "");

const words = (service) => SIGNS.flatMap(([sign, name, key]) => {
  const some = service[key].slice(0, SOME).map((it) => el("span", { class: name }, `${sign}${it} `));
  const more = service[key].length - SOME;
  return more > 0 ? [...some, el("span", { class: name }, `${sign}${more} more `)] : some;
});

const day = (it) => rfc3339(it.time).slice(0, 10);

// The title has the whole text, which may be cut in the table.
const whole = (parts) => {
  const node = el("span", {}, parts);
  node.title = node.textContent;
  return node;
};

// A row for each Service that a change touches, or one for a record without any; the newest first,
// each day at its first row.
export const rowsOf = (changes, service = "") => changes.flatMap((change, number) => {
  const touched = change.services.filter((it) => !service || it.service.startsWith(`${service}:`));
  const named = (it) => (service ? it.service.slice(service.length + 1) : it.service);
  const rows = touched.map((it) => ({ service: named(it), what: whole(words(it)) }));
  if (change.more_services) rows.push({ service: "", what: whole([`${change.more_services} more service ports`]) });
  const all = rows.length ? rows : [{ service: "", what: "" }];
  return all.map((it) => ({ ...it, time: change.time, cause: causes(change), id: `${number} ${change.time} ${it.service}` }));
}).reverse().map((it, at, rows) => ({ ...it, day: at && day(rows[at - 1]) === day(it) ? "" : day(it).slice(5) }));

export const changesTable = (caption, { ofAll = false } = {}) => {
  const time = (it) => el("time", { title: rfc3339(it.time), datetime: it.time }, clock(it.time));
  return new Table(caption, [
    { label: "Day", minor: true, name: "day", cell: (it) => it.day },
    { label: "Time", name: "time", cell: (it) => time(it) },
    ofAll ? { label: "Service", name: "whose", cell: (it) => servicePort(it.service) } : { label: "Port", name: "port", cell: (it) => it.service },
    { label: "Change", name: "change", cell: (it) => it.what },
    { label: "Cause", name: "cause", cell: (it) => it.cause },
  ], { name: "lines changes" });
};

const isCanary = (change) => change.services.length > 0 && change.services.every((it) => it.service.startsWith(`${CANARY}:`));

export const show = (body, { query, signal, tell }) => {
  let changes = [];
  const service = serviceField("Service", query.get("service") ?? "", signal);
  const since = select("since", SINCE, query.get("since") ?? "");
  const canaries = el("input", { type: "checkbox", name: "canaries" }), begins = el("p", { class: "quiet" });
  const given = () => Object.fromEntries([["service", service.input.value.trim()], ["since", since.value]].filter(([, it]) => it));
  const saveAll = () => get("history", { ...given(), limit: SAVED, whole: 1 }, signal).then((found) => save("ebpflb-history.jsonl", found.changes));
  const out = el("button", { type: "button", onclick: () => saveAll().catch((error) => signal.aborted || tell(error)) }, "Save as JSON lines");
  const list = changesTable("Changes, the newest first", { ofAll: true });
  const draw = (found) => {
    const shown = canaries.checked ? changes : changes.filter((it) => !isCanary(it));
    list.show(rowsOf(shown, service.input.value.trim()), (it) => it.id);
    const folded = changes.length - shown.length;
    setText(begins, [`history begins at ${rfc3339(found.begins)}`, found.earlier ? `${found.earlier} earlier changes are not shown` : "", folded ? `${folded} changes of the canary of \`ebpflb doctor\` are not shown` : "", ...found.notes].filter(Boolean).join("; "));
  };
  let last = null, asked = 0;
  const read = async () => {
    const number = ++asked;
    history.replaceState(null, "", `#/history?${new URLSearchParams(given())}`);
    const found = await get("history", given(), signal);
    if (number !== asked) return; // another Service or time was chosen meanwhile
    last = found;
    changes = last.changes;
    draw(last);
    tell(null);
  };
  const again = () => read().catch((error) => signal.aborted || tell(error));
  service.input.addEventListener("change", again);
  since.addEventListener("change", again);
  canaries.addEventListener("change", () => last && draw(last));
  body.append(el("form", { role: "search", onsubmit: (event) => { event.preventDefault(); again(); } },
    service.node, field("Since", since), el("button", {}, "Show"), out, el("label", { class: "check" }, canaries, "Show canaries")),
  begins, list.node);
  again();
};
