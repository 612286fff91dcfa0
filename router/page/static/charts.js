// Expected against observed first tokens, and paths over time. Each says in words what it shows.

import { node, percent, say, seconds, some } from "./words.js";

export const PATHS = ["local", "host", "disk", "remote", "peer", "recompute", "unknown", "refused"];
const POINTS = 600;
const STEP = 10; // seconds, as the router counts
const STEPS = 90;

function key(element, paths) {
  const swatch = (path) => node("svg:svg", { "aria-hidden": "true" }, node("svg:rect", { width: 12, height: 12, fill: `var(--${path})` }));
  element.replaceChildren(...paths.map((path) => node("span", {}, swatch(path), path)));
}

/** A drawing of the size it has on the page, so that lines are as thin as they are meant to be. */
function canvas(svg) {
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { width, height, left: 46, right: width - 6, top: 6, bottom: height - 22 };
}

const label = (x, y, anchor, text) => node("svg:text", { x, y, "text-anchor": anchor }, text);

export class Scatter {
  constructor() {
    this.svg = document.getElementById("scatter");
    this.points = [];
  }

  begin() {
    this.points = [];
  }

  take(points) {
    this.points = this.points.concat(points.filter(([expected, seen]) => expected > 0 && seen > 0)).slice(-POINTS);
  }

  show() {
    this.say();
    const box = canvas(this.svg);
    if (!this.points.length || box.width < 80) return this.svg.replaceChildren();
    const logs = this.points.flatMap(([expected, seen]) => [Math.log10(expected), Math.log10(seen)]);
    const [low, high] = [Math.floor(Math.min(...logs)), Math.max(Math.ceil(Math.max(...logs)), Math.floor(Math.min(...logs)) + 1)];
    const x = (value) => box.left + ((Math.log10(value) - low) / (high - low)) * (box.right - box.left);
    const y = (value) => box.bottom - ((Math.log10(value) - low) / (high - low)) * (box.bottom - box.top);
    const parts = [];
    for (let power = low; power <= high; power++) {
      const at = 10 ** power;
      parts.push(node("svg:path", { class: "grid", d: `M${x(at)} ${box.top}V${box.bottom}M${box.left} ${y(at)}H${box.right}` }));
      parts.push(label(x(at), box.bottom + 14, power === high ? "end" : "middle", seconds(at)), label(box.left - 5, y(at) + 4, "end", seconds(at)));
    }
    parts.push(node("svg:path", { class: "even-line", d: `M${x(10 ** low)} ${y(10 ** low)}L${x(10 ** high)} ${y(10 ** high)}` }));
    const paths = PATHS.filter((path) => this.points.some((point) => point[2] === path));
    for (const path of paths) {
      const d = this.points.filter((point) => point[2] === path).map(([expected, seen]) => `M${x(expected).toFixed(1)} ${y(seen).toFixed(1)}h0`);
      parts.push(node("svg:path", { d: d.join(""), stroke: `var(--${path})`, "stroke-width": 5, "stroke-linecap": "round", "stroke-opacity": 0.65 }));
    }
    this.svg.replaceChildren(...parts);
    key(document.getElementById("scatter-key"), paths);
  }

  say() {
    const element = document.getElementById("scatter-words");
    if (!this.points.length) return say(element, "No streamed request with an estimate has ended yet.");
    const errors = this.points.map(([expected, seen]) => seen / expected - 1).sort((one, other) => one - other);
    const sizes = errors.map(Math.abs).sort((one, other) => one - other);
    const middle = (values) => values[Math.floor(values.length / 2)];
    const bias = middle(errors);
    const side = Math.abs(bias) < 0.005 ? "no bias" : `typically ${percent(Math.abs(bias))} ${bias > 0 ? "later" : "sooner"} than expected`;
    return say(element, `Last ${some(this.points.length, "request")}: half are within ${percent(middle(sizes))}, ${side}. Across: expected; up: observed; on the line: right.`);
  }
}

export class PathsOverTime {
  constructor() {
    this.svg = document.getElementById("paths");
    this.steps = new Map(); // by their start
  }

  begin() {
    this.steps.clear();
  }

  take(steps) {
    for (const step of steps) this.steps.set(step.start, step.paths);
    const newest = Math.max(...this.steps.keys());
    for (const start of this.steps.keys()) if (start <= newest - STEP * STEPS) this.steps.delete(start);
  }

  show() {
    this.say();
    const box = canvas(this.svg);
    if (!this.steps.size || box.width < 80) return this.svg.replaceChildren();
    const newest = Math.max(...this.steps.keys());
    const shown = Math.min(STEPS, Math.max(18, (newest - Math.min(...this.steps.keys())) / STEP + 1));
    const most = Math.max(...[...this.steps.values()].map((paths) => Object.values(paths).reduce((sum, one) => sum + one, 0)));
    const wide = (box.right - box.left) / shown;
    const tall = (box.bottom - box.top) / most;
    const drawn = new Map();
    for (const [start, paths] of this.steps) {
      const x = box.right - ((newest - start) / STEP + 1) * wide;
      let y = box.bottom;
      for (const path of PATHS) {
        if (!paths[path]) continue;
        const height = paths[path] * tall;
        y -= height;
        drawn.set(path, `${drawn.get(path) ?? ""}M${x.toFixed(1)} ${y.toFixed(1)}h${Math.max(1, wide - 1).toFixed(1)}v${height.toFixed(1)}h-${Math.max(1, wide - 1).toFixed(1)}z`);
      }
    }
    const paths = PATHS.filter((path) => drawn.has(path));
    this.svg.replaceChildren(
      node("svg:path", { class: "grid", d: `M${box.left} ${box.top}H${box.right}M${box.left} ${box.bottom}H${box.right}` }),
      ...paths.map((path) => node("svg:path", { d: drawn.get(path), fill: `var(--${path})` })),
      label(box.left - 5, box.top + 8, "end", `${(most / STEP).toPrecision(2)}/s`), label(box.left - 5, box.bottom, "end", "0"),
      label(box.left, box.bottom + 16, "start", `${Math.round((shown * STEP) / 6) / 10} min before`), label(box.right, box.bottom + 16, "end", "last requests"),
    );
    key(document.getElementById("paths-key"), paths);
  }

  say() {
    const totals = new Map();
    for (const paths of this.steps.values()) for (const [path, number] of Object.entries(paths)) totals.set(path, (totals.get(path) ?? 0) + number);
    const all = [...totals.values()].reduce((sum, one) => sum + one, 0);
    const parts = PATHS.filter((path) => totals.has(path)).map((path) => `${path} ${percent(totals.get(path) / all)}`);
    say(document.getElementById("paths-words"), all ? `${some(all, "request")} ended in the last quarter of an hour: ${parts.join(", ")}.` : "No request has ended yet.");
  }
}

