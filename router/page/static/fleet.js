// The fleet as a table: a row for each replica, made once and then only changed where something changed.

import { age, count, node, percent, say, seconds, some, words } from "./words.js";

const RANK = { bad: 0, warn: 1, good: 2 };
const ROLES = { both: "" };

/** The state of a replica in a word, how bad it is, and a sign that does not need colour. */
export function stateOf(replica) {
  const { state, trouble, share } = replica.health;
  if (!replica.up) return { level: "bad", sign: "✕", word: "does not answer" };
  if (state === "open") return { level: "bad", sign: "✕", word: trouble ? `left alone: ${words(trouble)}` : "left alone" };
  if (replica.drained) return { level: "warn", sign: "◌", word: "drained" };
  if (state === "trial") return { level: "warn", sign: "△", word: "on trial" };
  if (share < 1) return { level: "warn", sign: "△", word: `slow start, ${percent(share)}` };
  return { level: "good", sign: "●", word: "up" };
}

/** How far its cache is known. */
export function eventsOf(replica) {
  const events = replica.events;
  if (events === null || events.carrier === "none") {
    return { level: replica.cache_is_guessed ? "warn" : "bad", word: replica.cache_is_guessed ? "none, guessed" : "none" };
  }
  const level = events.state === "live" ? "good" : events.state === "never_connected" ? "bad" : "warn";
  const old = events.age_s === null ? "" : `, ${age(events.age_s)}`;
  return { level, word: `${words(events.state)}${old}` };
}

export class FleetTable {
  /** askDrain : called with a replica when its button is pressed */
  constructor(askDrain) {
    this.rows = new Map();
    this.askDrain = askDrain;
    this.body = document.getElementById("replicas");
    this.find = document.getElementById("find");
    this.order = document.getElementById("order");
    this.last = null;
    for (const input of [this.find, this.order]) input.addEventListener("input", () => this.last && this.show(...this.last));
  }

  show(fleet, canEdit) {
    this.last = [fleet, canEdit];
    const replicas = this.sorted(fleet.replicas);
    const most = Math.max(1, ...fleet.replicas.map((one) => one.prefill_ahead_s ?? 0));
    const rows = replicas.map((replica) => this.row(replica, most, canEdit));
    const wanted = new Set(replicas.map((one) => one.name));
    for (const name of this.rows.keys()) if (!wanted.has(name)) this.rows.delete(name);
    this.arrange(rows);
    const left = fleet.replicas.length - replicas.length;
    say(document.getElementById("fleet-count"), left ? `${count(replicas.length)} of ${some(fleet.replicas.length, "replica")}` : some(replicas.length, "replica"));
    say(document.getElementById("fleet-note"), this.note(fleet, canEdit));
  }

  sorted(replicas) {
    const wanted = this.find.value.trim().toLowerCase();
    const found = replicas.filter((one) => !wanted || this.searched(one).includes(wanted));
    const byName = (one, other) => one.name.localeCompare(other.name, "en", { numeric: true });
    const byWork = (one, other) => (other.prefill_ahead_s ?? 0) - (one.prefill_ahead_s ?? 0) || byName(one, other);
    const badness = (one) => Math.min(RANK[stateOf(one).level], RANK[eventsOf(one).level] + 0.5);
    const byTrouble = (one, other) => badness(one) - badness(other) || byName(one, other);
    return found.sort({ name: byName, work: byWork, trouble: byTrouble }[this.order.value]);
  }

  searched(one) {
    return `${one.name} ${one.card ?? ""} ${one.role} ${stateOf(one).word} ${eventsOf(one).word}`.toLowerCase();
  }

  /** Rows in their order, moved only where they are not: moving takes the keyboard's focus away, which is given back. */
  arrange(rows) {
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    let at = this.body.firstElementChild;
    for (const row of rows) {
      if (row === at) at = at.nextElementSibling;
      else this.body.insertBefore(row, at);
    }
    while (at) {
      const gone = at;
      at = at.nextElementSibling;
      gone.remove();
    }
    if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }

  row(replica, most, canEdit) {
    const parts = this.rows.get(replica.name) ?? this.made(replica.name);
    const state = stateOf(replica);
    const events = eventsOf(replica);
    parts.replica = replica;
    say(parts.kind, [replica.card, ROLES[replica.role] ?? replica.role].filter(Boolean).join(" · "));
    say(parts.state, `${state.sign} ${state.word}`);
    parts.state.className = `state ${state.level === "good" ? "" : state.level}`;
    meter(parts.work, (replica.prefill_ahead_s ?? 0) / most, replica.prefill_ahead_s === null ? "–" : seconds(replica.prefill_ahead_s));
    say(parts.booked, count(replica.booked));
    say(parts.decoding, count(replica.decoding));
    meter(parts.fill, replica.kv_used_share ?? 0, percent(replica.kv_used_share));
    say(parts.events, events.word);
    parts.events.className = `events ${events.level === "good" ? "" : events.level}`;
    say(parts.seen, age(replica.signal_age_s));
    parts.seen.className = `number seen-age ${replica.signal_age_s === null || replica.signal_age_s > 10 ? "warn" : ""}`;
    parts.button.hidden = !canEdit;
    say(parts.button, replica.drained ? "Undrain" : "Drain");
    parts.button.setAttribute("aria-label", `${replica.drained ? "Undrain" : "Drain"} ${replica.name}`);
    return parts.row;
  }

  made(name) {
    const kind = node("small");
    const state = node("td", { class: "state" });
    const [work, fill] = [bare("work"), bare("fill")];
    const booked = node("td", { class: "number booked", "data-name": "booked" });
    const decoding = node("td", { class: "number decoding", "data-name": "decoding" });
    const events = node("td", { class: "events", "data-name": "events" });
    const seen = node("td", { class: "number", "data-name": "load seen" });
    const button = node("button", { type: "button" });
    const row = node("tr", {}, node("th", { scope: "row" }, name, kind), state, work.cell, booked, decoding, fill.cell, events, seen,
      node("td", { class: "edit" }, button));
    const parts = { row, kind, state, work, booked, decoding, fill, events, seen, button, replica: null };
    button.addEventListener("click", () => this.askDrain(parts.replica, button));
    this.rows.set(name, parts);
    return parts;
  }

  note(fleet, canEdit) {
    const told = fleet.stores.map((one) => `Events of ${one.name}: ${words(one.events.state)}.`);
    if (!canEdit) told.push("Replicas can be drained from here once admin_key_env names a key.");
    return told.join(" ");
  }
}

/** The one sentence to read at three in the morning. */
export function summaryOf(fleet) {
  const total = fleet.replicas.length;
  const states = fleet.replicas.map((one) => stateOf(one));
  const usable = states.filter((one) => one.word === "up" || one.word.startsWith("slow start")).length;
  const bad = fleet.replicas.filter((_, index) => states[index].level === "bad").map((one) => one.name);
  const up = usable === total ? `All ${some(total, "replica")} up` : `${usable} of ${some(total, "replica")} in use`;
  const trouble = bad.length ? `, in trouble: ${bad.slice(0, 3).join(", ")}${bad.length > 3 ? ` and ${bad.length - 3} more` : ""}` : "";
  const rule = fleet.experiment ? `experiment ${fleet.experiment.name}` : `policy ${fleet.policy}`;
  return { level: bad.length ? "bad" : "good", words: `${up}${trouble} · ${count(fleet.in_flight)} in flight · ${count(fleet.queued)} waiting · ${rule}` };
}

function bare(kind) {
  const [fill, text] = [node("b"), node("span")];
  const names = { work: "work ahead", fill: "cache" };
  return { fill, text, cell: node("td", { class: kind, "data-name": names[kind] }, node("div", { class: `meter ${kind}` }, node("i", {}, fill), text)) };
}

function meter(parts, share, text) {
  parts.fill.style.width = `${Math.round(Math.min(1, Math.max(0, share)) * 1000) / 10}%`;
  say(parts.text, text);
}
