// SPDX-License-Identifier: Apache-2.0
// Reads repeatedly while the page is visible: one reading at a time, a slow one less often.

import { Final, Refused } from "./api.js";

const SECONDS = 2, MOST_SECONDS = 30, PAUSES = 9; // between two readings; pauses a reading
let isPaused = false;

export const pause = (wanted) => { isPaused = wanted; };

// Call `read(signal)` until `signal` ends it or an answer is final; `tell(error or null)` after each.
export const live = async (read, signal, tell) => {
  while (!signal.aborted) {
    const begun = performance.now();
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
    const taken = (performance.now() - begun) / 1000;
    const seconds = Math.min(MOST_SECONDS, Math.max(SECONDS, PAUSES * taken));
    await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
  }
};
