// Which page is shown: all trials, or the one that the address names after `#`. The data stand in the file, or come from
// the server that watches a sweep.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const isLive = data.is_live;
const trialBox = document.getElementById("trial"), overviewBox = document.getElementById("overview");
let opened = null, from = null, isDone = false, wasFigure = false;

function say(text) {
  document.getElementById("said").textContent = text;
}

function wanted() {
  return new URLSearchParams(location.hash.slice(1));
}

/** Shows what the address asks for. */
async function route() {
  const asked = wanted(), id = asked.get("trial");
  if (id !== null) return openTrial(id);
  if (["points", "map"].includes(asked.get("kind")) && asked.get("kind") !== view.kind) Object.assign(view, { kind: asked.get("kind"), x: "", y: "", colour: "" });
  for (const key of ["x", "y", "colour"]) if (isKnown(asked.get(key))) view[key] = asked.get(key);
  setOverview(overview, isLive);
  const last = opened;
  opened = null;
  trialBox.hidden = true;
  trialBox.replaceChildren();
  overviewBox.hidden = false;
  document.title = data.title;
  drawAxes();
  draw();
  if (last) ((!wasFigure && document.querySelector(`#list a[href="#trial=${CSS.escape(last)}"]`)) || document.getElementById("figure")).focus();
}

async function openTrial(id) {
  const isNew = opened !== id;
  opened = id;
  const row = overview.trials.indexOf(id);
  const settings = row < 0 ? [] : Object.keys(overview.columns).filter((name) => overview.columns[name].is_setting && valueOf(name, row) !== null && valueOf(name, row) !== "").slice(0, 14).map((name) => [labelOf(name), valueOf(name, row)]);
  const found = await pageOf(id, row);
  isDone = Boolean(found.page.facts?.complete) && !found.page.incidents_missing;
  if (opened !== id) return;
  if (isNew && !overviewBox.hidden) wasFigure = document.activeElement.id === "figure";
  if (isNew) { overviewBox.hidden = true; trialBox.hidden = false; document.title = `trial ${id}`; }
  const at = scrollY, signal = document.getElementById("signal")?.value, isLog = document.getElementById("log")?.checked;
  const isOpen = document.getElementById("rest")?.open, held = document.activeElement?.id;
  showTrial(trialBox, found.page, found.curves, { settings, isLive, rest: found.rest });
  if (isNew) { scrollTo(0, 0); document.getElementById("trial-title").focus(); return; }
  // The same trial, which has gone on: the reader stays where they were.
  restore("signal", "value", signal);
  restore("log", "checked", isLog);
  if (isOpen) document.getElementById("rest").open = true;
  if (held) document.getElementById(held)?.focus();
  scrollTo(0, at);
}

function restore(id, key, value) {
  const control = document.getElementById(id);
  if (!control || value === undefined || control[key] === value) return;
  control[key] = value;
  control.dispatchEvent(new Event("change"));
}

/** What there is on a trial: its page, curves, and the fields at their defaults. */
async function pageOf(id, row) {
  if (isLive) return liveTrial(id);
  const page = Object.hasOwn(data.pages, id) ? data.pages[id] : null;
  if (page) return { page, curves: data.curves, rest: page.config ? data.rests[page.config.rest] : null };
  const why = row < 0 ? `This file has no trial ${id}.` : `Its curves are left out of this file. To have its page: stability-harness trial OUT ${id}`;
  return { page: { id, left_out: why }, curves: {} };
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && opened) location.hash = from || "";
});
document.getElementById("figure").addEventListener("keydown", walk);
document.getElementById("list").addEventListener("keydown", walkList);
document.getElementById("add-filter").addEventListener("click", () => {
  view.filters.push({ name: columnOptions()[0][0], test: "is", value: "" });
  drawFilters();
  document.querySelector("#filters fieldset:last-child select").focus();
});
addEventListener("hashchange", (event) => {
  const old = new URL(event.oldURL).hash.slice(1);
  if (!old.startsWith("trial=")) from = old;
  route();
});

function onShown() {
  if (isLive) drawMoving();
}

if (isLive) startLive();
else {
  setOverview(data.overview, false);
  document.getElementById("note").textContent = data.note;
  drawFilters();
  if (data.only && !location.hash) history.replaceState(null, "", `#trial=${data.only}`);
  route();
}
