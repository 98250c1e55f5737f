// SPDX-License-Identifier: Apache-2.0
// `ebpflb history` as a time line to go back in; what the maps held then, as `ebpflb maps dump --at`.

import { get } from "../api.js";
import { Table, el, field, setText, svg } from "../dom.js";

const WIDTH = 600, HEIGHT = 40, MAPS = ["services", "slots", "source_ranges", "cluster_ips", "devices", "settings"];

export const title = () => "History";

const clock = (at) => new Date(at).toLocaleString(undefined, { hour12: false, fractionalSecondDigits: 3, month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" });

const cause = (it) => [it.kind, it.version ? `${it.name}@${it.version}` : it.name, it.event].filter(Boolean).join(" ");

const SIGNS = [["+", "endpoints_added"], ["-", "endpoints_removed"], ["~", "endpoints_changed"], ["+", "frontends_added"], ["-", "frontends_removed"], ["~", "frontends_changed"]];
const SOME = 5;

const signed = (names, sign) => {
  const some = names.slice(0, SOME).map((name) => sign + name);
  return names.length > SOME ? [...some, `${sign}${names.length - SOME} more`] : some;
};

const words = (change, service) => {
  const services = change.services.filter((it) => !service || it.service.startsWith(`${service}:`)).map((it) =>
    `${it.service}: ${SIGNS.flatMap(([sign, name]) => signed(it[name], sign)).join(", ")}`);
  const maps = Object.entries(change.maps).map(([name, it]) =>
    `${name} ${Object.entries(it).map(([what, count]) => `${count} ${what}`).join(", ")}`);
  return services.length ? services.slice(0, SOME).join("; ") + (services.length > SOME ? `; ${services.length - SOME} more services` : "") : maps.join("; ");
};

const timeline = (changes, at) => {
  const times = changes.map((it) => Date.parse(it.time));
  const first = times[0], span = Math.max(1, times.at(-1) - first);
  const x = (it) => (4 + (it - first) / span * (WIDTH - 8)).toFixed(1);
  return svg("svg", { role: "img", "aria-label": `${changes.length} changes from ${clock(first)} to ${clock(times.at(-1))}`, width: "100%", height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" },
    svg("path", { class: "base", d: `M0 ${HEIGHT - 8}H${WIDTH}` }),
    times.map((it) => svg("path", { class: "line", d: `M${x(it)} 12V${HEIGHT - 8}` })),
    svg("path", { class: "arrow", d: `M${x(times[at])} 12l-5 -10h10z` }));
};

const dumped = (name, rows) => {
  if (!rows.length) return el("p", { class: "quiet" }, `${name}: no entries`);
  const table = new Table(`${name}, as it was`, Object.keys(rows[0]).map((key) => ({ label: key.replaceAll("_", " "), cell: (it) => it[key] })));
  table.show(rows, (it) => JSON.stringify(it));
  return table.node;
};

export const show = (body, { query, signal, tell, news }) => {
  let changes = [];
  const service = el("input", { name: "service", maxlength: 200, placeholder: "default/web, or all", value: query.get("service") ?? "" });
  const since = el("input", { name: "since", maxlength: 40, placeholder: "10m, 14:03, or all", value: query.get("since") ?? "" });
  const map = el("select", { name: "map" }, MAPS.map((it) => el("option", {}, it)));
  const slider = el("input", { type: "range", name: "change", min: 0, step: 1 });
  const chosen = el("p", { id: "chosen", role: "status" }), begins = el("p", { class: "quiet" });
  const strip = el("div"), past = el("div", { id: "past" });
  const list = new Table("Changes, the newest first", [
    { label: "Time", cell: (it) => el("button", { type: "button", onclick: () => choose(it.at) }, clock(it.time)) },
    { label: "Change", cell: (it) => words(it, service.value.trim()) },
    { label: "Cause", cell: (it) => it.causes.slice(0, SOME).map(cause).join("; ") + (it.more_causes || it.causes.length > SOME ? " and others" : "") },
  ]);
  const controls = el("div", {}, strip, field("Change to go back to", slider), chosen,
    el("form", { onsubmit: (event) => { event.preventDefault(); back().catch(tell); } },
      field("Map", map), el("button", {}, "Show what it held then")), past);
  const choose = (at) => {
    slider.value = at;
    const it = changes[at];
    strip.replaceChildren(timeline(changes, at));
    setText(chosen, `${clock(it.time)}: ${words(it, service.value.trim())}`);
    slider.setAttribute("aria-valuetext", clock(it.time));
    past.replaceChildren();
  };
  const back = async () => {
    const it = changes[Number(slider.value)];
    const found = await get("maps", { at: it.time, map: map.value }, signal);
    past.replaceChildren(...Object.entries(found.maps).map(([name, rows]) => dumped(name, rows)),
      el("p", { class: "quiet" }, [found.more ? `${found.more} more rows: ebpflb maps dump --at ${it.time}` : "", ...found.notes].filter(Boolean).join("; ")));
    news(`${map.value} as it was at ${clock(it.time)}`);
    tell(null);
  };
  const read = async () => {
    const given = Object.fromEntries([["service", service.value.trim()], ["since", since.value.trim()]].filter(([, it]) => it));
    const found = await get("history", given, signal);
    changes = found.changes;
    setText(begins, [`history begins at ${clock(found.begins)}`, found.earlier ? `${found.earlier} earlier changes are not shown` : "", ...found.notes].filter(Boolean).join("; "));
    list.show(changes.map((it, at) => ({ ...it, at })).reverse(), (it) => it.time);
    controls.hidden = !changes.length;
    slider.max = Math.max(0, changes.length - 1);
    if (changes.length) choose(changes.length - 1);
    tell(null);
  };
  slider.addEventListener("input", () => choose(Number(slider.value)));
  body.append(el("form", { role: "search", onsubmit: (event) => { event.preventDefault(); read().catch(tell); } },
    field("Service", service), field("Since", since), el("button", {}, "Show")),
  begins, controls, list.node);
  controls.hidden = true;
  read().catch((error) => signal.aborted || tell(error));
};
