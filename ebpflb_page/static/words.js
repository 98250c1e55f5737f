// SPDX-License-Identifier: Apache-2.0
// Numbers, times and verdicts as words.

export const percent = (share) => `${Math.round(share * 1000) / 10}%`;

export const rate = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : (Math.round(value * 10) / 10).toString());

// "3 d 4 h": the two largest units.
export const span = (seconds) => {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => seconds >= size);
  if (at < 0) return "0 s";
  const [size, unit] = parts[at], [smaller, name] = parts[at + 1] ?? [1, ""];
  const rest = name ? Math.floor((seconds % size) / smaller) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${name}` : ""}`;
};

const pad = (number, digits = 2) => String(number).padStart(digits, "0");

// RFC 3339 in the browser's zone.
export const rfc3339 = (text) => {
  const at = new Date(text), offset = -at.getTimezoneOffset(), size = Math.abs(offset);
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${day}T${clock(text)}${offset < 0 ? "-" : "+"}${pad(Math.floor(size / 60))}:${pad(size % 60)}`;
};

export const clock = (text) => {
  const at = new Date(text);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}`;
};

const GOOD = new Set(["translated", "masqueraded", "port_changed", "port_taken_over", "established", "reply_translated", "related"]);
const NEUTRAL = new Set(["passed", "malformed", "retried"]);

// The class by which a verdict of the datapath is coloured.
export const colour = (verdict) => (GOOD.has(verdict) ? "good" : NEUTRAL.has(verdict) ? "quiet" : "bad");

export const CANARY = "ebpflb_doctor/canary";
