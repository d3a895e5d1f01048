// The page of one trial, from what analysis/pages/trial_page.py tells of it.
"use strict";

const MOST_MARKS = 30;

/** Puts the page into `box`. `curves`: trial -> signal -> curve; `settings`: [name, value] each, as the overview has them. */
function showTrial(box, page, curves, { settings = [], isLive = false, rest = null } = {}) {
  const own = curves[page.id] || {}, golden = (page.golden && curves[page.golden]) || {};
  const head = make("h2", { tabIndex: -1, id: "trial-title" }, `Trial ${page.id}`);
  box.replaceChildren(
    make("p", {}, make("a", { href: "#", id: "back" }, "← all trials"), make("span", { className: "note" }, " (Escape)")), head);
  if (settings.length) box.append(make("p", { className: "settings" }, settings.map(([name, value]) => `${name} ${told(value)}`).join(" · ")));
  if (page.damage) return void box.append(make("p", { className: "wrong", role: "alert" }, `Its values cannot be read: ${page.damage}`));
  box.append(...words(page));
  if (Object.keys(own).length) charts(box, page, own, golden);
  else box.append(make("p", {}, page.left_out || "No step of it has been recorded yet."));
  if (page.facts) box.append(...tables(page, isLive, rest));
}

/** What became of it, in words. */
function words(page) {
  if (!page.facts) return [];
  const { outcome, nonfinite_step: lost, masked_step: masked, ...others } = page.facts;
  const said = [`Outcome: ${outcome}`];
  if (lost !== undefined) said.push(`not finite from step ${lost}`);
  if (masked !== undefined) said.push(`again its golden twin, bit for bit, after step ${masked}`);
  for (const [name, value] of Object.entries(others)) {
    if (["final_loss", "final_validation_loss", "strikes", "changes", "steps_lost"].includes(name)) said.push(`${name.replaceAll("_", " ")} ${told(value)}`);
  }
  if (!page.facts.complete) said.push(`its pack is not finished: ${page.facts.steps_done_by_its_pack} of ${page.facts.steps} steps are stored`);
  const parts = [make("p", { id: "outcome" }, `${said.join("; ")}.`)];
  if (page.golden) {
    const twin = page.has_twin ? make("a", { href: `#trial=${page.golden}` }, page.golden) : `${page.golden}, which is not in this store`;
    parts.push(make("p", {}, "Golden twin, the same trial without the fault: ", twin, "."));
  }
  return parts;
}

function charts(box, page, own, golden) {
  const [marks, notes] = struck(page);
  const names = Object.keys(own).filter((name) => name !== "deviation");
  const preferred = ["update_rms", "learning_rate"].find((name) => names.includes(name)) || names[0];
  let isLog = false, other = preferred;
  const places = [["loss", "plot-loss"], ["deviation", "plot-deviation"], ["grad_norm", "plot-grad-norm"], [null, "plot-other"]];
  const parts = places.filter(([name]) => name === null || own[name]?.y.length || own[name]?.holes.length).map(([name, id]) => {
    const title = make("h3", {}), chart = make("div", { id, className: "chart" }), about = make("p", { className: "note" });
    return { name, title, chart, about };
  });
  const draw = () => {
    for (const { name, title, chart, about } of parts) {
      const signal = name || other, curve = own[signal];
      title.textContent = `${curve.name[0].toUpperCase()}${curve.name.slice(1)}`;
      const lines = [{ name: signal, curve, colour: COLOURS[0], trial: page.id }];
      if (golden[signal]) lines.unshift({ name: "golden twin", curve: golden[signal], colour: COLOURS[1], width: 2.6, trial: page.golden });
      if (signal === "loss" && own.validation_loss) lines.push({ name: "validation loss", curve: own.validation_loss, colour: COLOURS[2], trial: page.id });
      drawCurves(chart, lines, { unit: curve.unit, isLog: isLog && signal !== "deviation", marks, notes, last: page.facts.steps });
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", described(signal, curve, golden[signal]));
      about.textContent = described(signal, curve, golden[signal]);
    }
  };
  const scale = make("input", { type: "checkbox", id: "log" });
  scale.addEventListener("change", () => { isLog = scale.checked; draw(); });
  box.append(make("p", { className: "controls" }, make("label", {}, scale, " logarithmic")));
  for (const { name, title, chart, about } of parts) {
    if (name === null) {
      const select = choice("Another signal", names.map((key) => [key, `${key}: ${own[key].name}`]), other, (value) => { other = value; draw(); });
      select.querySelector("select").id = "signal";
      box.append(make("p", { className: "controls" }, select));
    }
    box.append(title, chart, about);
  }
  box.append(make("p", { className: "note" }, "Dashed: strikes of the fault. Grey: incidents. Red: values that are not finite."));
  draw();
}

/** What a chart shows, for whoever does not see it, and how much of it. */
function described(signal, curve, golden) {
  const said = [];
  if (curve.y.length) {
    said.push(`From ${told(curve.y[0])} to ${told(curve.y.at(-1))}, between ${told(curve.y.reduce((a, b) => Math.min(a, b)))} and ${told(curve.y.reduce((a, b) => Math.max(a, b)))}`);
    if (golden && golden.y.length) said.push(`the golden twin ends at ${told(golden.y.at(-1))}`);
  }
  for (const [first, last, word] of curve.holes.slice(0, 3)) said.push(first === last ? `${word} at step ${first}` : `${word} from step ${first} to ${last}`);
  if (curve.holes.length > 3) said.push(`and so at ${curve.holes.length - 3} other places or more`);
  const cut = curve.of > curve.y.length ? ` Of ${curve.of} values ${curve.y.length} are drawn: of equal parts of the run the smallest and the largest.` : "";
  return `${said.join("; ") || "No value"}.${cut}`;
}

/** Strikes and incidents, as shapes of a chart and words beside them. */
function struck(page) {
  const marks = [], notes = [];
  for (const one of page.incidents) marks.push({ type: "rect", x0: one.first - 0.5, x1: one.last + 0.5, y0: 0, y1: 1, yref: "paper", line: { width: 0 }, fillcolor: "rgba(90,90,90,0.12)", layer: "below" });
  const at = [...new Set(page.events.map((event) => event.step).filter((step) => typeof step === "number"))];
  for (const step of at.slice(0, MOST_MARKS)) marks.push({ type: "line", x0: step, x1: step, y0: 0, y1: 1, yref: "paper", line: { color: "#8a1500", width: 1, dash: "dash" } });
  if (at.length) notes.push(note(at[0], "strike", 0.99));
  return [marks, notes];
}

function tables(page, isLive, rest) {
  const parts = [];
  const records = (title, rows, none) => {
    const heading = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    parts.push(make("h3", {}, title), rows.length ? table(heading.map((name) => name.replaceAll("_", " ")), rows.map((row) => heading.map((name) => row[name])), title) : make("p", {}, none));
  };
  records("Incidents and alarms", page.incidents.map(({ acts, ...row }) => row), page.incidents_missing || "None: no symptom, no alarm, and no check that was made failed.");
  const acts = page.incidents.flatMap((one) => one.acts);
  if (acts.length) records("What was done", acts, "");
  if (page.golden) records("Strikes", page.events, page.facts.complete ? "The fault never fired." : "Not known before the pack is finished.");
  if (Object.keys(page.provenance).length) parts.push(make("h3", {}, "Where the first value that is not finite came from"), table(["what", "value"], Object.entries(page.provenance), "provenance"));
  if (page.postmortem) {
    const place = isLive ? make("code", {}, page.postmortem) : make("a", { href: page.postmortem }, page.postmortem);
    parts.push(make("p", {}, "Its post-mortem: ", place, isLive ? " in the results folder." : "."));
  }
  parts.push(make("h3", {}, "Configuration"), table(["key", "value", "default"], page.config.changed.map(([key, value, usual]) => [key, JSON.stringify(value), usual === null ? "" : JSON.stringify(usual)]), "Configuration", "What is not the default, and the fault's own fields"));
  const others = table(["key", "value"], (rest || page.config.rest).map(([key, value]) => [key, JSON.stringify(value)]), "All other fields");
  parts.push(make("details", { id: "rest" }, make("summary", {}, "All other fields: those at their defaults, and those of the fault that are not set"), others));
  parts.push(make("h3", {}, "The command that trains it alone"), make("pre", { id: "command", tabIndex: 0 }, page.command));
  parts.push(make("p", { className: "note" }, `It trains this trial, and its golden twin if it has a fault, into a new folder. Trained by the same version it has the same id, ${page.id}. Mitigations and faults of your own want their --config-dir.`));
  return parts;
}
