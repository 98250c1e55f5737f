// SPDX-License-Identifier: Apache-2.0
// A bar for a share, bars of endpoints, and a line for a minute.

import { svg } from "./dom.js";

const SECONDS = 60, WIDTH = 120, HEIGHT = 28;

export const percent = (share) => `${Math.round(share * 1000) / 10}%`;
export const rate = (value) => value.toFixed(1);

export const bar = (share, label) =>
  svg("svg", { role: "img", "aria-label": label, width: WIDTH, height: 12, viewBox: `0 0 ${WIDTH} 12` },
    svg("rect", { class: "empty", width: WIDTH, height: 12 }),
    svg("rect", { class: "bar", width: (Math.min(1, share) * WIDTH).toFixed(1), height: 12 }));

// One bar an endpoint, relative to the highest.
export const bars = (values, label) => {
  const most = Math.max(...values, 1e-9), width = Math.min(12, WIDTH / Math.max(1, values.length));
  return svg("svg", { role: "img", "aria-label": label, width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}` },
    svg("path", { class: "base", d: `M0 ${HEIGHT - .5}H${WIDTH}` }),
    values.map((value, at) => {
      const height = value / most * (HEIGHT - 2);
      return svg("rect", {
        class: "bar", x: (at * width).toFixed(1), y: (HEIGHT - 1 - height).toFixed(1),
        width: (width * .8).toFixed(1), height: height.toFixed(1),
      });
    }));
};

export const line = (points, name) => {
  const most = Math.max(...points.map((it) => it.new), 1e-9);
  const at = (it) => `${(WIDTH * (1 - it.age / SECONDS)).toFixed(1)} ${(HEIGHT - 1 - it.new / most * (HEIGHT - 3)).toFixed(1)}`;
  const highest = points.length ? rate(most < 1e-6 ? 0 : most) : "not measured yet";
  return svg("svg", { role: "img", "aria-label": `${name}: the last minute, highest ${highest}`, width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}` },
    svg("path", { class: "base", d: `M0 ${HEIGHT - .5}H${WIDTH}` }),
    points.length > 1 ? svg("path", { class: "line", d: `M${points.map(at).join("L")}` }) : null);
};
