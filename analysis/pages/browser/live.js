// What a page that watches a sweep shows beside its trials: how far it is, the curves that move, incidents as they come.
"use strict";

const SECOND = 1000;
const MOST_CURVES = 20;
let news = { version: 0, moved: [] }, signal = "loss", curvesAsked = 0;

async function asked(path) {
  const answer = await fetch(path);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

function startLive() {
  document.getElementById("live").hidden = false;
  view.kind = "map";
  look();
}

/** Asks for what is new, shows it, and asks again a second later. */
async function look() {
  try {
    const found = await asked(`/data/news?version=${news.version}`);
    const isFirst = !overview.trials.length;
    const hasMoved = found.beat !== news.beat, isLookedAt = found.unread !== news.unread;
    news = { ...news, ...found };
    drawProgress();
    if (found.overview) {
      setOverview(found.overview, true);
      if (isFirst) { drawFilters(); await route(); } else if (!opened) { drawAxes(); draw(); }
    }
    if ((hasMoved || isLookedAt) && opened && !isDone) await openTrial(opened);
    else if (hasMoved && !opened && overview.trials.length) drawMoving();
  } catch (error) {
    message(error instanceof TypeError ? "The server does not answer any more: was it ended?" : error.message);
  }
  setTimeout(look, document.hidden ? 5 * SECOND : news.version ? SECOND : SECOND / 4);
}

function message(text) {
  const box = document.getElementById("message");
  if (box.textContent !== text) box.textContent = text;
  box.hidden = !text;
}

function drawProgress() {
  message(news.message || "");
  const p = news.progress;
  if (!p) return;
  const bar = document.getElementById("bar");
  bar.max = Math.max(1, p.asked);
  bar.value = p.done;
  const parts = [`${p.done} of ${p.asked} trials done`, `${p.training} in training`, `${p.waiting} waiting`];
  const steps = `${p.steps_done} of ${p.steps} steps of the trials that have begun`;
  const life = p.packs.length ? `; last sign of life ${told(Math.round(Math.min(...p.packs.map((pack) => pack.age))))} s ago` : "";
  document.getElementById("progress").textContent = `${parts.join(", ")}; ${steps}${life}.`;
  const rows = p.packs.map((pack) => [pack.id, pack.trials, pack.frozen, `${pack.steps} of ${pack.of}`, `${Math.round(pack.age)} s ago${pack.is_stopped ? ", stopped" : ""}`]);
  document.getElementById("packs").replaceChildren(...(rows.length ? [table(["pack", "trials", "not finite", "steps", "last sign of life"], rows, "Packs in training")] : []));
  const feed = document.getElementById("incidents");
  const lines = news.incidents.map((one) => {
    const link = make("a", { href: `#trial=${one.trial}` }, one.trial);
    const seen = [one.symptoms, one.signs].filter(Boolean).join(", ");
    const what = [seen && `seen: ${seen}`, one.detectors && `alarms: ${one.detectors}`].filter(Boolean).join("; ");
    return make("li", {}, `steps ${one.first} to ${one.last} of `, link, `: ${one.outcome}; ${what}${one.action === "none" ? "" : `; done: ${one.action}`}`);
  });
  const held = document.activeElement?.hash;
  feed.replaceChildren(...(lines.length ? lines : [make("li", {}, "None so far.")]));
  if (held && document.activeElement === document.body) feed.querySelector(`a[href="${held}"]`)?.focus();
  document.getElementById("incidents-note").textContent = news.unread ? `Still to be looked through: ${news.unread} trials.` : "";
}

/** The loss curves of the trials that moved last, of those that the filter leaves. */
async function drawMoving() {
  const number = ++curvesAsked;
  const rows = new Map(overview.trials.map((trial, row) => [trial, row]));
  const trials = news.moved.filter((trial) => rows.has(trial) && passes(rows.get(trial))).slice(0, MOST_CURVES);
  const names = ["loss", "validation_loss", "grad_norm", ...(news.signals || []).filter((name) => !["loss", "validation_loss", "grad_norm"].includes(name))];
  const box = document.getElementById("moving-choice");
  if (box.dataset.names !== names.join()) {
    box.dataset.names = names.join();
    box.replaceChildren(choice("signal", names.map((name) => [name, name.replaceAll("_", " ")]), signal, (value) => { signal = value; drawMoving(); }));
  }
  const about = document.getElementById("moving-note");
  document.getElementById("moving").hidden = box.hidden = !trials.length;
  if (!trials.length) {
    about.textContent = news.moved.length ? "None of the trials that moved last passes the filter." : "No trial has moved since this page was opened.";
    return;
  }
  try {
    const found = await asked(`/data/curves?signal=${encodeURIComponent(signal)}&trials=${trials.join()}`);
    if (number !== curvesAsked || opened) return;
    const varies = ["mitigation", "fault", "playbook", "width", "lr", "seed", ...varying].filter((name, place, all) => varying.includes(name) && all.indexOf(name) === place).slice(0, 4);
    const lines = Object.entries(found.curves).map(([trial, curve]) => ({ trial, curve, name: varies.map((name) => told(valueOf(name, rows.get(trial)))).join(" · ") || trial }));
    await drawCurves(document.getElementById("moving"), lines, { unit: found.unit });
    wireMoving();
    about.textContent = `${lines.length} of ${news.moved.length} trials that moved last, named by ${varies.map(labelOf).join(" · ") || "id"}. Click a curve to open its trial.`;
  } catch (error) {
    about.textContent = `The curves cannot be read: ${error.message}`;
  }
}

function wireMoving() {
  const box = document.getElementById("moving");
  if (box.hasClick) return;
  box.hasClick = true;
  box.on("plotly_click", ({ points: [point] }) => { location.hash = `trial=${point.data.meta}`; });
}

async function liveTrial(id) {
  try {
    return await asked(`/data/trial?id=${encodeURIComponent(id)}`);
  } catch (error) {
    return { page: { id, damage: error.message }, curves: {} };
  }
}
