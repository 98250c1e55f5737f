// SPDX-License-Identifier: Apache-2.0
// What `ebpflb status` says.

import { get } from "../api.js";
import { el } from "../dom.js";
import { live } from "../live.js";

const HEAD = new Set(["verdict", "reasons"]);

export const title = () => "Node";

const shown = (value) => {
  if (Array.isArray(value)) return value.length ? value.join(", ") : "none";
  if (value && typeof value === "object") {
    const items = Object.entries(value).map(([name, it]) =>
      el("li", {}, `${name}: ${typeof it === "object" && it ? Object.entries(it).map(([k, v]) => `${k.replaceAll("_", " ")} ${v}`).join(", ") : it}`));
    return items.length ? el("ul", {}, items) : "none";
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  return value == null || value === "" ? "none" : String(value);
};

export const show = (body, { signal, tell, news }) => {
  const verdict = el("p", { class: "verdict", id: "verdict" }, "reading");
  const reasons = el("ul", { id: "reasons" });
  const facts = el("dl", { id: "facts" });
  body.append(verdict, reasons, el("h2", {}, "What that rests on"), facts);
  let last = "";
  live(async () => {
    const found = await get("status", {}, signal);
    const text = JSON.stringify(found);
    if (text === last) return;
    last = text;
    if (verdict.dataset.verdict !== found.verdict) news(`verdict: ${found.verdict}`);
    verdict.dataset.verdict = found.verdict;
    verdict.className = `verdict ${found.verdict}`;
    verdict.textContent = found.reasons.length ? found.verdict : `${found.verdict}: this node is served`;
    reasons.replaceChildren(...found.reasons.map((it) =>
      el("li", {}, el("strong", { class: it.verdict }, it.verdict), ` ${it.text}`)));
    facts.replaceChildren(...Object.entries(found).filter(([name]) => !HEAD.has(name)).flatMap(
      ([name, value]) => [el("dt", {}, name.replaceAll("_", " ")), el("dd", { id: `fact-${name}` }, shown(value))]));
  }, signal, tell);
};
