// Live decisions, newest first, and one of them opened with all its candidates.

import { bar, commonAxis, drawAxis, legend } from "./bars.js";
import { age, count, node, percent, say, seconds, some, words } from "./words.js";

const LISTED = 24;
const KEPT = 60; // of either kind, so that the list is full whatever is asked for
const NAMED = 12; // candidates shown at first

export class Decisions {
  /** run : of the router whose decisions these are; said : tells people who cannot see what happened */
  constructor(said) {
    this.said = said;
    this.run = null;
    this.kept = [];
    this.rows = new Map();
    this.open = null; // number of the opened one
    this.body = document.getElementById("list");
    this.which = document.getElementById("which");
    this.panel = document.getElementById("opened");
    this.which.addEventListener("input", () => this.show());
    document.getElementById("legend").replaceChildren(...legend());
    this.leave = () => this.close();
    this.panel.addEventListener("keydown", (event) => event.key === "Escape" && this.leave());
  }

  /** Another router's decisions have nothing to do with those shown. */
  begin(run) {
    this.run = run;
    this.kept = [];
    this.rows.clear();
    this.body.replaceChildren();
    this.close();
    this.show();
  }

  take(decisions) {
    const changed = new Set(decisions.map((one) => one.number));
    this.kept = this.kept.filter((one) => !changed.has(one.number)).concat(decisions);
    this.kept.sort((one, other) => other.number - one.number);
    const left = { true: KEPT, false: KEPT };
    this.kept = this.kept.filter((one) => left[one.notable]-- > 0);
    if (decisions.length) this.show();
  }

  show() {
    const listed = this.kept.filter((one) => this.which.value === "all" || one.notable).slice(0, LISTED);
    const bars = listed.filter((one) => one.chosen);
    const end = commonAxis(bars.map((one) => one.chosen), bars.map((one) => one.waited_s));
    drawAxis(document.getElementById("axis"), end);
    const wanted = new Set(listed.map((one) => one.number));
    for (const [number, row] of this.rows) {
      if (wanted.has(number) || row.contains(document.activeElement)) continue; // who is on a row stays on it
      row.remove();
      this.rows.delete(number);
    }
    for (const one of listed) {
      if (!this.rows.has(one.number)) this.rows.set(one.number, this.row(one));
      fill(this.rows.get(one.number), one, end);
    }
    this.arrange();
    say(document.getElementById("list-note"), this.note(listed));
  }

  arrange() {
    const rows = [...this.rows].sort(([one], [other]) => other - one).map(([, row]) => row);
    rows.forEach((row, index) => {
      if (this.body.children[index] === row) return;
      const focused = row.contains(document.activeElement) ? document.activeElement : null;
      this.body.insertBefore(row, this.body.children[index] ?? null);
      focused?.focus({ preventScroll: true });
    });
  }

  note(listed) {
    if (!listed.length) return this.which.value === "all" ? "No request has come yet." : "None of the kept decisions failed, was late or was asked about.";
    if (listed.every((one) => !one.chosen)) return "This rule reads no estimates and nobody else asked for them, so there is nothing to draw. With --receipts the router estimates always.";
    return "A few of each second are shown. Open one to see every candidate and why.";
  }

  row(one) {
    const button = node("button", { type: "button", class: "plain", "aria-expanded": "false", title: one.id }, one.id);
    button.addEventListener("click", () => (this.open === one.number ? this.close() : this.load(one, button)));
    return node("tr", {}, node("td", {}, button), node("td"), node("td", { class: "bar" }), node("td", { class: "number" }));
  }

  // One of them, opened

  async load(one, button) {
    let opened;
    try {
      const response = await fetch(`page/decisions/${one.number}?run=${this.run}`);
      opened = await response.json();
      if (!response.ok) throw new Error(opened.error);
    } catch (error) {
      this.said(`${one.id}: ${error.message}`);
      opened = { ...one, candidates: one.chosen ? [one.chosen] : [], shadows: [], tried: [], why: `${error.message}.`, what_came: "" };
    }
    this.mark(one.number);
    this.leave = () => {
      this.close();
      (button.isConnected ? button : this.which).focus();
    };
    this.draw(opened);
  }

  mark(number) {
    this.open = number;
    for (const [each, row] of this.rows) {
      const here = each === number;
      if (here) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
      row.querySelector("button").setAttribute("aria-expanded", String(here));
    }
  }

  close() {
    this.mark(null);
    this.panel.hidden = true;
    this.panel.replaceChildren();
  }

  draw(one) {
    const title = node("h2", { id: "opened-title", tabindex: "-1" }, one.id);
    const shut = node("button", { type: "button" }, "Close");
    shut.addEventListener("click", () => this.leave());
    this.panel.replaceChildren(
      node("div", { class: "head" }, title, shut),
      node("p", { class: "why" }, one.why),
      node("p", { class: "why" }, one.what_came),
      candidateTable(one),
      node("dl", {}, ...facts(one)),
    );
    this.panel.hidden = false;
    title.focus({ preventScroll: matchMedia("(min-width: 1100px)").matches });
  }
}

/** What changes about a request until it has ended; drawn anew only where something did, or the axis is another. */
function fill(row, one, end) {
  const drawn = `${one.changed} ${end}`;
  if (row.dataset.drawn === drawn) return;
  row.dataset.drawn = drawn;
  const [, taken, picture, came] = row.children;
  const where = one.chosen ? `${one.chosen.replica} · ${one.chosen.path}` : one.outcome === "refused" ? "refused" : "–";
  const [level, flag] = flagOf(one);
  taken.title = where;
  taken.replaceChildren(where, ...(flag ? [node("small", { class: level }, ` ${flag}`)] : []));
  picture.replaceChildren(...(one.chosen ? [bar(one.chosen, end, one.waited_s)] : []));
  say(came, one.waited_s !== null ? seconds(one.waited_s) : one.outcome === null ? "waiting" : "–");
}

function flagOf(one) {
  if (one.outcome === null) return ["faint", one.attempts > 1 ? `under way, attempt ${one.attempts}` : "under way"];
  if (one.outcome === "ok") return ["warn", one.late ? "late" : ""];
  return [one.outcome === "cancelled" ? "warn" : "bad", words(one.cause ?? one.outcome)];
}

function candidateTable(one) {
  if (!one.candidates.length) return node("p", { class: "faint" }, "No candidates: it was placed without estimates, or not at all.");
  const end = commonAxis(one.candidates.slice(0, NAMED), [one.waited_s]);
  const axis = node("svg:svg", { class: "axis", "aria-hidden": "true" });
  drawAxis(axis, end);
  const body = node("tbody");
  const fill = (most) => body.replaceChildren(...one.candidates.slice(0, most).map((each, index) => candidateRow(one, each, index, end)));
  fill(NAMED);
  const head = ["Candidate", node("span", { class: "unseen" }, "Queue, fetch and compute"), "Mean", "Hit"];
  const cells = head.map((text, at) => node("th", { scope: "col", class: at === 1 ? "bar" : at > 1 ? "number" : null }, text, at === 1 ? axis : null));
  const table = node("table", { class: "candidates" },
    node("caption", { class: "unseen" }, "Every candidate, the taken one first, then by expected first token"),
    node("thead", {}, node("tr", {}, ...cells)), body);
  if (one.candidates.length <= NAMED) return table;
  const more = node("button", { type: "button" }, `Show all ${one.candidates.length} candidates`);
  more.addEventListener("click", () => {
    fill(one.candidates.length);
    more.remove();
  });
  return node("div", {}, table, more);
}

function candidateRow(one, each, index, end) {
  const chosen = index === 0 && one.chosen !== null;
  const seen = chosen ? one.waited_s : null;
  const reused = each.local_tokens + each.fetched_tokens;
  const hint = [
    reused ? `${some(each.local_tokens, "token")} of its own, ${count(each.fetched_tokens)} fetched` : "nothing reused",
    each.approximate ? "a guess, for want of events" : null,
    each.evidence ? `rests on ${words(each.evidence)}` : null,
    `load seen ${age(each.signal_age_s)}`,
    words(each.calibration),
    `delays others by ${seconds(each.queue_price_s + each.decode_price_s)}`,
    `then ${seconds(each.pace_s)} per token`,
  ];
  return node("tr", { class: chosen ? "chosen" : null, title: hint.filter(Boolean).join("; ") },
    node("th", { scope: "row" }, `${chosen ? "▶ " : ""}${each.replica}`, node("small", {}, each.path, chosen ? node("span", { class: "unseen" }, ", taken") : null)),
    node("td", { class: "bar" }, bar(each, end, seen)),
    node("td", { class: "number" }, seconds(each.expected_s)),
    node("td", { class: "number" }, reused ? percent(each.hit_probability) : "–"));
}

function facts(one) {
  const chosen = one.chosen;
  const rows = [
    ["Prompt", `${some(one.prompt_tokens, "token")}${one.prompt_exact === false ? ", about" : ""}`],
    ["Reuse expected", chosen ? `${count(chosen.local_tokens)} own, ${count(chosen.fetched_tokens)} fetched` : null],
    ["Reuse reported", one.cached_tokens === null ? null : count(one.cached_tokens)],
    ["Answer", one.output_tokens === null ? null : some(one.output_tokens, "token")],
    ["Answer expected", one.expected_output_tokens === null ? null : some(Math.round(one.expected_output_tokens), "token")],
    ["Arrival to first token", one.first_token_s === null ? null : seconds(one.first_token_s)],
    ["Arrival to end", one.ended_s === null ? null : seconds(one.ended_s)],
    ["Deadline", one.deadline_s === null ? null : seconds(one.deadline_s)],
    ["p90, p99 expected", chosen && chosen.p90_s !== null ? `${seconds(chosen.p90_s)}, ${seconds(chosen.p99_s)}` : null],
    ["Price for others", chosen ? seconds(chosen.queue_price_s + chosen.decode_price_s) : null],
    ["Load report", chosen ? age(chosen.signal_age_s) : null],
    ["Policy", one.arm ? `${one.policy}, arm ${one.arm}` : one.policy],
    ["Attempts", one.attempts > 1 ? `${one.attempts}, first ${one.tried.join(", ")}` : null],
    ["Model", one.model],
    ...one.shadows.map((each) => [`Shadow ${each.arm}`, `${each.replica} · ${each.path}`]),
  ];
  return rows.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, value)));
}
