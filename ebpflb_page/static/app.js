// SPDX-License-Identifier: Apache-2.0
// Which page is shown: what follows # in the address names it. And on every page: the verdict.

import { Final, Refused, get, setToken } from "./api.js";
import { el, field, setText } from "./dom.js";
import { live, pause } from "./live.js";
import * as events from "./pages/events.js";
import * as explain from "./pages/explain.js";
import * as history from "./pages/history.js";
import * as overview from "./pages/overview.js";
import * as service from "./pages/service.js";
import * as services from "./pages/services.js";

const PAGES = { "": overview, services, service, explain, events, history };
const NO_AGENT = "no agent runs";
const byId = (id) => document.getElementById(id);
const main = byId("main");
let ending = new AbortController(), title = "", verdict = "";

// Says an error, or that there is none any more; once, so a screen reader says it once.
const tell = (error) => {
  if (error instanceof Refused) askToken();
  setText(byId("problem"), error ? error.message : "");
  byId("problem").hidden = !error;
};

const news = (text) => setText(byId("news"), text);

const setTitle = () => {
  document.title = [verdict && verdict !== "OK" ? `${verdict}: ${title}` : title, byId("node-name").textContent || "ebpflb"].join(" - ");
};

const heading = (text) => {
  title = text;
  setTitle();
  return el("h1", { tabindex: "-1" }, text);
};

const askToken = () => {
  ending.abort();
  const token = el("input", { type: "password", name: "token", autocomplete: "off", required: true });
  const form = el("form", {
    onsubmit: (event) => {
      event.preventDefault();
      setToken(token.value);
      tell(null);
      show();
      watchVerdict();
    },
  }, field("Token", token), el("button", {}, "Show this node"));
  main.replaceChildren(heading("Token"), form);
  token.focus();
};

const show = () => {
  ending.abort();
  ending = new AbortController();
  tell(null);
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("?")[0].split("/");
  const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
  for (const link of document.querySelectorAll("nav a")) {
    const target = link.getAttribute("href").slice(2);
    const isHere = target === name || (target === "services" && name === "service");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const page = Object.hasOwn(PAGES, name) ? PAGES[name] : null;
  const path = rest.map(decodeURIComponent).join("/");
  const head = heading(page ? page.title(path) : "No such page");
  const body = el("div");
  main.replaceChildren(head, body);
  if (page) page.show(body, { path, query, signal: ending.signal, tell, news });
  else body.append(el("p", {}, `This page has no part called "${name}". `, el("a", { href: "#/" }, "To the overview")));
  return head;
};

addEventListener("hashchange", () => {
  if (location.hash === "#main") return main.focus();
  show().focus();
});

byId("pause").addEventListener("click", () => {
  const wanted = byId("pause").getAttribute("aria-pressed") !== "true";
  byId("pause").setAttribute("aria-pressed", String(wanted));
  pause(wanted);
  news(wanted ? "paused" : "goes on");
});

// In the heading, the document's title, the icon, and a banner where something is wrong.
const showVerdict = (found) => {
  if (verdict && verdict !== found.verdict) news(`verdict: ${found.verdict}`);
  verdict = found.verdict;
  setText(byId("verdict"), verdict);
  byId("verdict").className = `pill ${verdict}`;
  byId("icon").href = `/static/icon-${verdict.toLowerCase()}.svg`;
  if (found.node) setText(byId("node-name"), found.node);
  setTitle();
  const reasons = found.reasons.map((it) => it.text);
  const first = found.reasons.find((it) => it.cause === NO_AGENT)?.text ?? reasons[0] ?? "";
  const more = reasons.length > 1 ? ` And ${reasons.length - 1} more: see the overview.` : "";
  setText(byId("banner"), first && `${first[0].toUpperCase()}${first.slice(1)}.${more}`);
  byId("banner").className = verdict;
  byId("banner").hidden = !first;
};

const unknown = (error) => {
  if (!error) return;
  verdict = "UNKNOWN";
  setText(byId("verdict"), verdict);
  byId("verdict").className = `pill ${verdict}`;
  byId("icon").href = "/static/icon-unknown.svg";
  setTitle();
  if (error instanceof Final) tell(error);
};

const watchVerdict = () => live(async () => {
  const found = await get("status");
  showVerdict(found);
  dispatchEvent(new CustomEvent("status", { detail: found }));
}, new AbortController().signal, unknown);

show();
watchVerdict();
