// Numbers and elements: how a value is said, and how a node is made. Text only ever goes in as text.

const SVG = "http://www.w3.org/2000/svg";

/** A node with attributes and children. Names with "svg:" before them are of SVG; strings become text. */
export function node(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set text only where it changed, so that selections and screen readers are left in peace. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A time as people read it: three digits and a unit; unknown is a dash. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const small = Math.abs(value) < 1;
  const scaled = small ? value * 1000 : value;
  return `${digits(scaled)} ${small ? "ms" : "s"}`;
}

/** A sum; unknown where one part is. By itself the language would make nothing of it, and zero is not unknown. */
export function sum(...parts) {
  return parts.some((one) => one === null || one === undefined) ? null : parts.reduce((all, one) => all + one, 0);
}

/** What is left of a span after its beginning; unknown where either is. */
export function between(from, until) {
  return from === null || until === null ? null : until - from;
}

/** An age, coarser: whether it is two or three seconds is worth knowing, a tenth is not. */
export function age(value) {
  if (value === null || value === undefined) return "never";
  if (value < 1) return "now";
  if (value < 120) return `${Math.round(value)} s ago`;
  return value < 7200 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

/** A function that says whether a mouse is on it: what somebody is about to press should not move away. */
export function mouseOn(element, left = () => {}) {
  let on = false;
  element.addEventListener("pointerenter", (event) => (on = event.pointerType === "mouse")); // a finger does not stay
  element.addEventListener("pointerleave", () => {
    on = false;
    left();
  });
  return () => on;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

export function count(number) {
  return number === null || number === undefined ? "–" : number.toLocaleString("en");
}

export function some(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function words(name) {
  return (name ?? "unknown").replaceAll("_", " ");
}

/** A round number of seconds, at least `longest` (> 0) and at most two and a half times that. */
export function axisEnd(longest) {
  for (let power = 1e-4; ; power *= 10) {
    for (const step of [1, 2, 2.5, 5, 10]) if (step * power >= longest) return step * power;
  }
}

function digits(value) {
  if (value === 0) return "0";
  return Number(value.toPrecision(3)).toLocaleString("en", { useGrouping: false, maximumFractionDigits: 6 });
}
