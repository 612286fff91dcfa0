// Arms of an experiment side by side; without one, what all requests saw, in the same words.

import { count, node, percent, say, seconds } from "./words.js";

const ROWS = [
  ["Rule", (arm) => arm.policy],
  ["Share meant", (arm, shares) => (shares[arm.name] ? percent(shares[arm.name].share) : "–")],
  ["Requests", (arm) => count(arm.requests)],
  ["Failed", (arm) => count(arm.failed)],
  ["Late", (arm) => count(arm.late)],
  ["First token, median", (arm) => at(arm.first_token_s, 0)],
  ["First token, p90", (arm) => at(arm.first_token_s, 1)],
  ["First token, p99", (arm) => at(arm.first_token_s, 2)],
  ["End to end, median", (arm) => at(arm.end_to_end_s, 0)],
  ["End to end, p90", (arm) => at(arm.end_to_end_s, 1)],
  ["Estimate off by, median", (arm) => percent(arm.error_share)],
  ["Within the p90 told", (arm) => percent(arm.within_p90)],
  ["Within the p99 told", (arm) => percent(arm.within_p99)],
];

const at = (quantiles, index) => (quantiles === null ? "–" : seconds(quantiles[index]));

export function showArms(arms, experiment) {
  const shares = experiment?.arms ?? {};
  const words = experiment
    ? `Experiment ${experiment.name}, assigned by ${experiment.assign_by}. The last few thousand requests; which arm is better is for tfirst ab to say.`
    : "No experiment runs; this is what the last few thousand requests saw.";
  say(document.getElementById("arms-words"), words);
  const named = arms.map((arm) => node("th", { scope: "col", class: "number" }, arm.name || (experiment ? "in no arm" : "all requests")));
  document.getElementById("arms-head").replaceChildren(node("tr", {}, node("td"), ...named));
  const rows = ROWS.filter(([name]) => experiment || name !== "Share meant").map(([name, value]) =>
    node("tr", {}, node("th", { scope: "row" }, name), ...arms.map((arm) => node("td", { class: "number" }, value(arm, shares)))));
  document.getElementById("arms-body").replaceChildren(...(arms.length ? rows : []));
}
