// SPDX-License-Identifier: Apache-2.0
// Fields with suggestions: pods, Services, verdicts, maps.

import { get } from "./api.js";
import { el, field, select, suggested } from "./dom.js";

export const ANOTHER = "another";

// A field for a Service by name; suggestions come while the user types.
export const serviceField = (label, value, signal, attributes = {}) => {
  const { input, list, suggest } = suggested("service", { value, placeholder: "any, or type a part of a name", ...attributes });
  let asked = null;
  const look = async () => {
    if (asked === input.value) return;
    asked = input.value;
    const found = await get("services", { match: asked.trim(), sort: "service", limit: 50 }, signal);
    if (asked === input.value) suggest(found.list.services.map((it) => it.service));
  };
  for (const event of ["focus", "input"]) input.addEventListener(event, () => look().catch(() => {}));
  return { input, node: field(label, input, list) };
};

// A field with options, and a text that means none of them.
export const choice = (label, name, options, value, another) => {
  const isListed = options.some(([it]) => it === value);
  const chosen = select(name, [...options, [ANOTHER, another]], isListed ? value : ANOTHER);
  const text = el("input", { name: `${name}-text`, "aria-label": another, maxlength: 200, spellcheck: "false", value: isListed ? "" : value, hidden: isListed });
  chosen.addEventListener("change", () => {
    text.hidden = chosen.value !== ANOTHER;
    if (!text.hidden) text.focus();
  });
  const current = () => (chosen.value === ANOTHER ? text.value.trim() : chosen.value);
  return { node: field(label, chosen, text), current, chosen };
};

let known = null;

// The choices on this node; read once.
export const choices = (signal) => {
  known ??= get("choices", {}, signal).catch((error) => {
    known = null;
    throw error;
  });
  return known;
};
