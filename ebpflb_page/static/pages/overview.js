// SPDX-License-Identifier: Apache-2.0
// The state of the node: the verdict and its reasons, current rates, and the Services that have a
// problem; the facts of `ebpflb status` are folded.

import { get } from "../api.js";
import { spark } from "../charts.js";
import { el, problem, serviceLink, setText } from "../dom.js";
import { live } from "../live.js";
import { Table } from "../table.js";
import { percent, rate, span } from "../words.js";

const HEADS = new Set(["verdict", "reasons", "version", "now"]);
const LATE_SECONDS = 240, FULL = .8;

export const title = () => "Overview";

const PROBLEMS = [
  { label: "Service", cell: (it) => serviceLink(it.service) },
  { label: "Problem", name: "why", cell: (it) => problem(it.problems.join("; ")) },
  { label: "Endpoints", number: true, cell: (it) => it.used },
];

const shown = (value) => {
  if (Array.isArray(value)) return value.length ? value.join(", ") : "none";
  if (value && typeof value === "object") {
    const items = Object.entries(value).map(([name, it]) =>
      el("li", {}, `${name}: ${typeof it === "object" && it ? Object.entries(it).map(([k, v]) => `${k.replaceAll("_", " ")} ${v}`).join(", ") : it}`));
    return items.length ? el("ul", {}, items) : "none";
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  return String(value);
};

const isEmpty = (value) => value == null || value === "" || (typeof value === "object" && !Object.keys(value).length);

// A number with its name, and below it a line of the last minutes with its scale.
const card = (label) => {
  const value = el("p", { class: "value" }, "-"), below = el("div"), scale = el("p", { class: "scale" });
  const node = el("section", { class: "card", "aria-label": label }, el("h2", {}, label), value, below, scale);
  const show = (text, unit, picture, words, isBad = false) => {
    value.replaceChildren(text, el("small", {}, unit));
    below.replaceChildren(picture ?? "");
    setText(scale, words);
    node.classList.toggle("warned", isBad);
  };
  return { node, show };
};

// The server's values of the last hour: ages, and values by name.
let kept = { ages: [] };

// `inWords` formats a value, `words` explain it.
const showKept = (made, label, name, value, inWords, [text, unit], words, isBad) => {
  const values = [...(kept[name] ?? []), value], ages = [...kept.ages, 0];
  const scale = `highest ${inWords(Math.max(...values))} in the last ${span(Math.max(ages[0], 1))}; ${words}`;
  made.show(text, unit, spark(values, `${label}, ${scale}`, 300, 48, ages), scale, isBad);
};

const showRate = (made, values, ages, label, warns) => {
  if (!values.length) return made.show("-", "", null, "rates are being measured");
  const most = Math.max(...values);
  const words = `highest ${rate(most)}/s in the last ${span(Math.max(...ages, 1))}`;
  made.show(rate(values.at(-1)), "/s", spark(values, `${label}, ${words}`, 300, 48, ages), words, warns && values.at(-1) > 0);
};

const freshness = (status) => {
  const times = Object.entries(status.last_received ?? {}).map(([kind, at]) => [Date.parse(status.now) - Date.parse(at), kind]);
  return times.length ? times.sort((a, b) => b[0] - a[0])[0] : null;
};

const showFreshness = (made, status, runs) => {
  const oldest = freshness(status);
  if (!oldest) return made.show("-", "", null, "nothing received");
  const seconds = Math.max(0, oldest[0] / 1000), late = span(LATE_SECONDS);
  const words = `oldest of all kinds: ${oldest[1]}; late after ${late}`;
  showKept(made, "API's freshness", "received", seconds, span, [span(seconds), " ago"], words, runs && seconds > LATE_SECONDS);
};

const engine = (status) => {
  const path = status.packet_path;
  return path ? `${path.engine ?? path}` : "unknown";
};

export const show = (body, { signal, tell }) => {
  const reasons = el("ul", { id: "reasons" }), says = el("p", { id: "says" }, "reading"), about = el("dl", { class: "about" });
  const facts = el("dl", { id: "facts" });
  const cards = ["New connections", "Refused", "Dropped", "Endpoints not used", "Fullest map", "API's freshness"].map(card);
  const [fresh, refused, dropped, unused, fullest, received] = cards;
  const table = new Table("Services with a problem", PROBLEMS, { name: "problems", empty: "none: every Service is served as specified" });
  const more = el("p", { class: "quiet" });
  body.append(
    el("section", { class: "verdict-box", "aria-label": "Verdict" }, el("div", {}, says, reasons), about),
    el("div", { class: "cards" }, cards.map((it) => it.node)), table.node, more,
    el("details", {}, el("summary", {}, "All facts, as `ebpflb status` prints them"), facts));
  let latest = null;
  const showStatus = (status) => {
    setText(says, { OK: "This node is served.", DEGRADED: "This node is served, but something is wrong.", DOWN: "Sockets of this node are not served." }[status.verdict]);
    says.className = status.verdict;
    reasons.replaceChildren(...status.reasons.map((it) => el("li", {}, el("strong", { class: it.verdict }, it.verdict), ` ${it.text}`)));
    const runs = status.agent === "runs", age = (Date.parse(status.now) - Date.parse(status.started)) / 1000;
    const pairs = [["Agent", runs && status.started ? `running for ${span(age)}` : runs ? "running" : "not running"], ["Version", status.version], ["Engine", engine(status)], ["Services from", status.source ?? "unknown"], ["Addresses", status.addresses], ["Handed over", status.hand_over]].filter(([, it]) => it);
    about.replaceChildren(...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    latest = [status, runs];
    showFreshness(received, ...latest);
    facts.replaceChildren(...Object.entries(status).filter(([name, value]) => !HEADS.has(name) && !isEmpty(value)).flatMap(
      ([name, value]) => [el("dt", {}, name.replaceAll("_", " ")), el("dd", { id: `fact-${name}` }, shown(value))]));
  };
  const read = async () => {
    const found = await get("overview", {}, signal);
    const { ages } = found.rates;
    showRate(fresh, found.rates.new, ages, "New connections");
    showRate(refused, found.rates.refused, ages, "Refused", true);
    showRate(dropped, found.rates.dropped, ages, "Dropped", true);
    const all = found.used + found.unused;
    kept = found.kept;
    if (latest) showFreshness(received, ...latest);
    showKept(unused, "Endpoints not used", "unused", found.unused, String, [String(found.unused), ` of ${all}`], "not ready, or elsewhere under policy Local");
    const most = found.maps[0], share = most ? most.entries / most.limit : 0;
    if (most) showKept(fullest, "Fullest map", "fullest", share, percent, [percent(share), ` ${most.name}`], `${most.entries} of ${most.limit} entries`, share > FULL);
    table.show(found.list.services, (it) => it.service);
    setText(more, [found.list.more ? `${found.list.more} more Services have a problem` : "", ...found.list.notes, found.age > 10 ? `Services as of ${span(found.age)} ago` : ""].filter(Boolean).join("; "));
  };
  const onStatus = (event) => showStatus(event.detail);
  addEventListener("status", onStatus, { signal });
  get("status", {}, signal).then(showStatus).catch(() => {});
  live(read, signal, tell);
};
