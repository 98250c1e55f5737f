// SPDX-License-Identifier: Apache-2.0
// Which page is shown: what follows # in the address names it.

import { Refused, get, setToken } from "./api.js";
import { el, field, setText } from "./dom.js";
import { pause } from "./live.js";
import * as events from "./pages/events.js";
import * as explain from "./pages/explain.js";
import * as history from "./pages/history.js";
import * as node from "./pages/node.js";
import * as service from "./pages/service.js";
import * as services from "./pages/services.js";

const PAGES = { "": node, services, service, explain, events, history };
const main = document.getElementById("main");
const problem = document.getElementById("problem");
let ending = new AbortController();

// Says an error, or that there is none any more; once, so a screen reader says it once.
const tell = (error) => {
  if (error instanceof Refused) askToken();
  setText(problem, error ? error.message : "");
  problem.hidden = !error;
};

export const news = (text) => setText(document.getElementById("news"), text);

const heading = (text) => {
  const made = el("h1", { tabindex: "-1" }, text);
  document.title = `${text} - ebpflb`;
  return made;
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
  const page = PAGES[name] ?? node;
  const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
  for (const link of document.querySelectorAll("nav a")) {
    const target = link.getAttribute("href").slice(2);
    const isHere = target === name || (target === "services" && name === "service");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const path = rest.map(decodeURIComponent).join("/");
  const head = heading(page.title(path));
  const body = el("div");
  main.replaceChildren(head, body);
  page.show(body, { path, query, signal: ending.signal, tell, news });
  return head;
};

addEventListener("hashchange", () => {
  if (location.hash === "#main") return main.focus();
  show().focus();
});

const button = document.getElementById("pause");
button.addEventListener("click", () => {
  const wanted = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(wanted));
  pause(wanted);
  news(wanted ? "paused" : "goes on");
});

show();
get("status").then((it) => setText(document.getElementById("node-name"), it.node ?? "")).catch(() => {});
