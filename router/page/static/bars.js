// One candidate as a bar on a time axis: T_first = max(Q, R) + C, drawn.
//
// Queue and fetch run side by side, so they have a lane each; compute follows the later of the two and has both. A
// whisker ends at the p90, a diamond stands where the first token came. Shape says what colour says: nothing is told by
// colour alone.

import { axisEnd, node, seconds } from "./words.js";

const HEIGHT = 16;
const OWN_LINK = new Set(["host", "disk"]); // over the replica's own link, not the network

/** End of the axis all of these fit on: candidates, and when first tokens came. */
export function commonAxis(candidates, seen = []) {
  const times = candidates.flatMap((one) => [one.spans[4], one.expected_s]).concat(seen);
  return axisEnd(Math.max(1e-3, ...times.filter((value) => Number.isFinite(value))));
}

export function bar(candidate, end, seen = null) {
  const drawn = node("svg:svg", { class: "bar", role: "img", "aria-label": barWords(candidate, seen) });
  drawn.append(node("svg:title", {}, barWords(candidate, seen)));
  const [queueUntil, fetchFrom, fetchUntil, computeFrom, first] = candidate.spans;
  const at = (value) => `${Math.min(100, Math.max(0, (value / end) * 100))}%`;
  const span = (kind, from, until, y, height) => {
    if (!(until > from)) return;
    const width = `${Math.min(100, ((until - from) / end) * 100)}%`;
    drawn.append(node("svg:rect", { class: kind, x: at(from), y, width, height }));
  };
  span("queue", 0, queueUntil, 2, 5);
  span(OWN_LINK.has(candidate.path) ? "bring" : "fetch", fetchFrom, fetchUntil, 9, 5);
  span("compute", computeFrom, first, 2, 12);
  if (candidate.p90_s !== null && candidate.p90_s > first) {
    drawn.append(node("svg:line", { class: "whisker", x1: at(first), x2: at(candidate.p90_s), y1: 8, y2: 8 }));
    drawn.append(node("svg:line", { class: "whisker", x1: at(candidate.p90_s), x2: at(candidate.p90_s), y1: 5, y2: 11 }));
  }
  if (seen !== null) drawn.append(diamond(at(seen)));
  return drawn;
}

/** The same for who does not see it. */
export function barWords(candidate, seen = null) {
  const [queueUntil, fetchFrom, fetchUntil, computeFrom, first] = candidate.spans;
  const parts = [`queue ${seconds(queueUntil)}`];
  if (fetchUntil > fetchFrom) parts.push(`fetch ${seconds(fetchUntil - fetchFrom)}`);
  parts.push(`compute ${seconds(first - computeFrom)}`, `first token expected after ${seconds(candidate.expected_s)}`);
  if (seen !== null) parts.push(`came after ${seconds(seen)}`);
  return parts.join(", ");
}

/** Numbers of an axis from 0 to `end`, drawn into `svg`. */
export function drawAxis(svg, end) {
  const label = (x, anchor, text) => node("svg:text", { x, y: 11, "text-anchor": anchor }, text);
  svg.replaceChildren(label("0", "start", "0"), label("50%", "middle", seconds(end / 2)), label("100%", "end", seconds(end)));
}

export function legend() {
  const entry = (word, ...shapes) => node("span", {}, node("svg:svg", { "aria-hidden": "true" }, ...shapes), word);
  const rect = (kind, y, height) => node("svg:rect", { class: kind, x: 0, y, width: 18, height });
  return [
    entry("queue", rect("queue", 1, 5)),
    entry("fetch, network", rect("fetch", 6, 5)),
    entry("fetch, own link", rect("bring", 6, 5)),
    entry("compute", rect("compute", 0, 12)),
    entry("p90", node("svg:path", { class: "whisker", d: "M0 6H16M16 2V10" })),
    entry("observed", node("svg:svg", { y: -2 }, diamond("50%"))),
  ];
}

function diamond(x) {
  // A path cannot be placed in per cent; a nested drawing can.
  return node("svg:svg", { x, y: 0, width: 1, height: HEIGHT, class: "axis" },
    node("svg:path", { class: "seen", d: "M0 3L5 8L0 13L-5 8Z" }));
}
