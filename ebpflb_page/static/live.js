// SPDX-License-Identifier: Apache-2.0
// Reads again and again while the page is seen, one reading at a time.

import { Final, Refused } from "./api.js";

const SECONDS = 2;
let isPaused = false;

export const pause = (wanted) => { isPaused = wanted; };

// `read(signal)` until `signal` ends it, or an answer is final; `tell(error or null)` after each.
export const live = async (read, signal, tell) => {
  while (!signal.aborted) {
    if (!isPaused && !document.hidden) {
      try {
        await read(signal);
        if (!signal.aborted) tell(null);
      } catch (error) {
        if (signal.aborted) return;
        tell(error);
        if (error instanceof Refused || error instanceof Final) return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, SECONDS * 1000));
  }
};
