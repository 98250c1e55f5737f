// SPDX-License-Identifier: Apache-2.0
// Requests to the server. The token is only in this tab's memory, never in an address.

const TOKEN = "ebpflb-token";

export class Refused extends Error {}

// A final answer: the server would answer the same again.
export class Final extends Error {}

export const setToken = (token) => sessionStorage.setItem(TOKEN, token);

const asked = async (path, parameters, signal) => {
  const query = new URLSearchParams(parameters);
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(`/api/${path}?${query}`, { headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("`ebpflb ui` does not answer: has it ended?");
  }
  if (response.status === 401) throw new Refused("this page asks for a token");
  if (response.ok) return response;
  const text = await sentence(response);
  throw response.status === 400 || response.status === 404 ? new Final(text) : new Error(text);
};

const sentence = async (response) => {
  try {
    return (await response.json()).error;
  } catch {
    return `the server answered with status ${response.status}`;
  }
};

export const get = async (path, parameters = {}, signal = undefined) =>
  (await asked(path, parameters, signal)).json();

// Server-sent events, read by fetch because it can send the token; calls `each(value)` until the end.
export const stream = async (path, parameters, each, signal) => {
  const response = await asked(path, parameters, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) each(JSON.parse(part.slice(6)));
  }
};
