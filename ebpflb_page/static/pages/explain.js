// SPDX-License-Identifier: Apache-2.0
// `ebpflb explain` as a form; the way from the client to the verdict, and the endpoints beside it.

import { get } from "../api.js";
import { bar } from "../charts.js";
import { choice, choices, serviceField } from "../choices.js";
import { el, field, select, setOptions } from "../dom.js";
import { Table } from "../table.js";
import { percent } from "../words.js";

const NODE = "node", OUTSIDE = "outside", ANYWHERE = /^(0\.0\.0\.0|\[::\]):/;
const COLOURS = { 0: "good", 3: "neutral", 4: "bad", 5: "bad" }; // by the command's exit status

export const title = () => "Explain";

const ENDPOINTS = [
  { label: "Chance", cell: (it) => el("span", { class: "with-bar" }, el("span", {}, percent(it.chance)), bar(it.chance, `${it.endpoint}: chance ${percent(it.chance)}`)) },
  { label: "Endpoint", cell: (it) => it.endpoint },
  { label: "Pod", cell: (it) => it.pod },
  { label: "Node", minor: true, cell: (it) => it.node },
  { label: "Slots", minor: true, cell: (it) => it.slot },
  { label: "Note", cell: (it) => it.note },
];

const who = (from) => from.kind === NODE ? "this node"
  : from.address && from.address !== from.name ? `${from.name} (${from.address})` : from.name;

const step = (it, name, kind = null) => el("li", { class: kind },
  el("b", {}, name), el("span", {}, it.what));

const way = (found) => el("ol", { class: "way", "aria-label": `The way to ${found.to} in ${found.steps.length} steps` },
  step({ what: who(found.from) }, "client"),
  found.steps.slice(1).map((it) => step(it, it.step, it.step === "verdict" ? COLOURS[found.status] : null)));

const shown = (found) => {
  const beside = el("div", { class: "beside" });
  if (found.endpoints.length) {
    const endpoints = new Table("Endpoints, and the chance of a new connection", ENDPOINTS, { name: "chances" });
    endpoints.show(found.endpoints, (it) => `${it.endpoint} ${it.slot}`);
    beside.append(endpoints.node);
  }
  if (found.more_endpoints) beside.append(el("p", { class: "quiet" }, `${found.more_endpoints} more endpoints: ebpflb explain --limit 0`));
  if (found.notes.length) beside.append(el("ul", { class: "notes" }, found.notes.map((it) => el("li", {}, it))));
  return [
    el("p", { class: `answer ${COLOURS[found.status]}`, id: "explained" }, `${found.verdict}: ${found.says}`),
    el("div", { class: "two" }, way(found), beside),
  ];
};

// "10.96.0.10:80/tcp" of a row of the Service; a NodePort is asked for at an address of the node.
const target = (frontend, protocol, node) => {
  const isV6 = frontend.startsWith("["), own = node.find((it) => it.includes(":") === isV6);
  const at = isV6 ? `[${own}]:` : `${own}:`;
  return `${own ? frontend.replace(ANYWHERE, at) : frontend}/${protocol.toLowerCase()}`;
};

const targets = (page, node) => page.ports.flatMap((port) => port.frontends.map((it) => {
  const to = target(it.frontend, port.protocol, node);
  return [to, `${to} (${it.kind})`];
}));

export const show = (body, { query, signal, tell, news }) => {
  const asked = (name) => query.get(name) ?? "";
  const service = serviceField("To: a Service, or ADDRESS:PORT", asked("service") || asked("to"), signal, { required: true, placeholder: "default/web, or 10.96.0.10:80" });
  const frontend = select("to", []), place = field("Frontend", frontend), form = el("form", {}), answer = el("div", { id: "answer" });
  const button = el("button", { class: "main" }, "Explain"), port = el("input", { name: "from_port", inputmode: "numeric", placeholder: "any", size: 6, maxlength: 5, value: asked("from_port") });
  place.hidden = true;
  let node = [], from = null, named = "";

  // Fills in the frontends where a Service is named.
  const look = async (wanted = "") => {
    const name = service.input.value.trim(), isService = /^[^/:]+\/[^/:]+$/.test(name);
    place.hidden = !isService;
    if (!isService || name === named) return;
    const found = await get("service", { name }, signal);
    named = name;
    const options = targets(found.page, node);
    setOptions(frontend, options);
    const at = options.findIndex(([to]) => to === wanted || to.startsWith(`${wanted}/`));
    frontend.selectedIndex = Math.max(0, at);
  };
  const given = () => {
    const isService = !place.hidden, found = { to: isService ? frontend.value : service.input.value.trim(), from: from.current() || NODE };
    if (isService) found.service = named;
    if (port.value.trim()) found.from_port = port.value.trim();
    return found;
  };
  const read = async () => {
    button.disabled = true;
    answer.replaceChildren(el("p", { class: "quiet" }, "asking the programs"));
    try {
      await look();
      const { service: _, ...question } = given();
      if (!place.hidden && !frontend.value) throw new Error(`${named} has no frontend: nothing is served`);
      history.replaceState(null, "", `#/explain?${new URLSearchParams(given())}`);
      const found = await get("explain", question, signal);
      answer.replaceChildren(...shown(found));
      news(`${found.verdict}: ${found.says}`);
      tell(null);
    } catch (error) {
      answer.replaceChildren();
      if (!signal.aborted) tell(error);
    } finally {
      button.disabled = false;
    }
  };
  const fill = (found) => {
    node = found.node;
    const senders = [[NODE, "this node"], [OUTSIDE, "a client outside"], ...found.pods.map((it) => [it.name, `pod ${it.name} (${it.addresses[0]})`])];
    from = choice("From", "from", senders, asked("from") || NODE, "another address or pod");
    form.replaceChildren(service.node, place, from.node, field("From port", port), button);
    if (!service.input.value) return null;
    const wanted = asked("to") && target(asked("to").split("/")[0], asked("to").split("/")[1] ?? "tcp", node);
    return look(wanted).then(() => asked("to") && read());
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    read();
  });
  service.input.addEventListener("change", () => look().then(() => tell(null)).catch((error) => signal.aborted || tell(error)));
  body.append(form,
    el("p", { class: "quiet" }, "No packet is sent: the loaded programs answer. This page's address repeats the question."),
    answer);
  choices(signal).catch(() => ({ pods: [], node: [] })).then(fill).catch((error) => signal.aborted || tell(error));
};
