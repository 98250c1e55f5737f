// SPDX-License-Identifier: Apache-2.0
// Shows the page that the address names after #, and on every page the verdict.

import { Refused, get, setToken } from "./api.js";
import { el, field, serviceName, setText } from "./dom.js";
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

// Shows an error, or removes the last one. An error that the banner shows already is not repeated.
const tell = (error) => {
  if (error instanceof Refused) askToken();
  const text = error?.message ?? "";
  setText(byId("problem"), text === byId("banner").textContent ? "" : text);
  byId("problem").hidden = !byId("problem").textContent;
};

const news = (text) => setText(byId("news"), text);

const setTitle = () => {
  document.title = `${verdict ? `${verdict}: ` : ""}${title} - ${byId("node-name").textContent || "ebpflb"}`;
};

const heading = (text) => {
  title = text;
  setTitle();
  return el("h1", { tabindex: "-1" }, text.includes("/") ? serviceName(text) : text);
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

const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
};

// Only the page of a Service has a path behind its name.
const pageAt = (name, path) => {
  const page = Object.hasOwn(PAGES, name) ? PAGES[name] : null;
  return page && (page === service) === (path !== "") ? page : null;
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
  const path = rest.map(decoded).join("/"), page = pageAt(name, path);
  const head = heading(page ? page.title(path) : "No such page");
  const body = el("div");
  main.replaceChildren(head, body);
  if (page) page.show(body, { path, query, signal: ending.signal, tell, news });
  else body.append(el("p", {}, `This page has no part called "${[name, ...rest].map(decoded).join("/")}". `, el("a", { href: "#/" }, "To the overview")));
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
  news(wanted ? "paused" : "resumed");
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
  const end = /[.?!]$/.test(first) ? "" : ".";
  showBanner(first && `${first[0].toUpperCase()}${first.slice(1)}${end}${more}`, verdict);
};

const showBanner = (text, name) => {
  setText(byId("banner"), text);
  byId("banner").className = name;
  byId("banner").hidden = !text;
};

const showUnknown = (error) => {
  if (!error) return;
  verdict = "UNKNOWN";
  setText(byId("verdict"), verdict);
  byId("verdict").className = `pill ${verdict}`;
  byId("icon").href = "/static/icon-unknown.svg";
  setTitle();
  if (error instanceof Refused) return;
  showBanner(error.message, "DOWN");
  if (byId("problem").textContent === error.message) tell(null);
};

const watchVerdict = () => live(async () => {
  const found = await get("status");
  showVerdict(found);
  dispatchEvent(new CustomEvent("status", { detail: found }));
}, new AbortController().signal, showUnknown);

show();
watchVerdict();
