// The page: follows the router's stream of news and hands each part to who shows it. Old news is called old.

import { showArms } from "./arms.js";
import { PathsOverTime, Scatter } from "./charts.js";
import { Decisions } from "./decisions.js";
import { Drain } from "./drain.js";
import { FleetTable, stateOf, summaryOf } from "./fleet.js";
import { say } from "./words.js";

const OLD_MS = 5000; // news comes every second
const THEMES = ["system", "light", "dark"];

const find = (id) => document.getElementById(id);
const said = (text) => say(find("said"), text);

const drain = new Drain(said);
const fleetTable = new FleetTable((replica) => drain.ask(replica));
const decisions = new Decisions(said);
const scatter = new Scatter();
const paths = new PathsOverTime();
const charts = [scatter, paths];

let heard = performance.now();
let lost = false;
let paused = false;
let run = null;
let levels = new Map();
let latest = null; // news that came while paused is taken in, and shown later

function take(news) {
  heard = performance.now();
  lost = false;
  if (news.run !== run) {
    run = news.run;
    decisions.begin(run);
    for (const chart of charts) chart.begin();
  } else if (news.first) {
    for (const chart of charts) chart.begin(); // told anew from the beginning
  }
  scatter.take(news.points);
  if (news.steps.length) paths.take(news.steps);
  latest = { ...news, decisions: [...(latest?.decisions ?? []), ...news.decisions].slice(-200) };
  if (!paused) show();
  stale();
}

function show() {
  if (latest === null) return;
  const { fleet, can_edit: canEdit, arms } = latest;
  const summary = summaryOf(fleet);
  say(find("summary"), summary.words);
  find("summary").className = summary.level === "good" ? "" : summary.level;
  document.title = summary.level === "bad" ? "✕ tfirst" : "tfirst";
  fleetTable.show(fleet, canEdit);
  decisions.take(latest.decisions);
  latest.decisions = [];
  for (const chart of charts) chart.show();
  showArms(arms, fleet.experiment);
  announce(fleet);
}

/** Say aloud who changed state, and nothing else: a page that talks every second is turned off. */
function announce(fleet) {
  const now = new Map(fleet.replicas.map((one) => [one.name, stateOf(one)]));
  const changed = [...now].filter(([name, state]) => levels.has(name) && levels.get(name).level !== state.level);
  if (changed.length) said(changed.slice(0, 4).map(([name, state]) => `${name}: ${state.word}`).join("; "));
  levels = now;
}

function stale() {
  const silent = performance.now() - heard;
  const banner = find("stale");
  if (!lost && silent < OLD_MS) {
    banner.hidden = true;
    return;
  }
  const words = latest === null ? "No word from the router yet." : "No word from the router: what is shown is old.";
  if (banner.textContent !== words) banner.textContent = words;
  banner.hidden = false;
}

function follow() {
  const source = new EventSource("page/events");
  source.addEventListener("news", (event) => take(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    lost = true;
    stale();
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 2000); // refused: it does not try again by itself
  });
}

find("pause").addEventListener("click", (event) => {
  paused = !paused;
  say(event.target, paused ? "Resume" : "Pause");
  if (!paused) show();
});

function themed(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  say(find("theme"), `Theme: ${theme}`);
}

function remembered() {
  try {
    const kept = localStorage.getItem("tfirst-theme");
    return THEMES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // a browser that keeps nothing
  }
}

find("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
  themed(next);
  try {
    localStorage.setItem("tfirst-theme", next);
  } catch {
    // it lasts as long as the page does
  }
});

addEventListener("resize", () => charts.forEach((chart) => chart.show()));
setInterval(stale, 1000);
themed(remembered());
follow();
