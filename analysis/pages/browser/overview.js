// All trials: a filter by any column, a figure of any three, and a list. What is shown stands in `view`.
"use strict";

const ROWS = 100; // of the list, on a page of it
const FEW = 40; // different values of a column that are offered as a choice
const VALUES = ["final_loss", "latest_loss", "final_validation_loss"];

const view = { kind: "points", x: "", y: "", colour: "", filters: [], sort: "", isDown: false, page: 0, cell: null, cursor: null };
let overview = { trials: [], golden: [], columns: {} };
let shownRows = []; // numbers of the trials that the filter leaves, in the order of the list
let varying = []; // `settingsThatVary`
let spots = []; // what the arrow keys walk through in the figure: {x, y, trials, text}

/** The value of a column in a trial, a text or a number; null where it is not known. */
function valueOf(name, row) {
  const column = overview.columns[name], value = column.values[row];
  return column.kind === "text" ? column.words[value] : value === "Infinity" ? Infinity : value === "-Infinity" ? -Infinity : value;
}

const labelOf = (name) => overview.columns[name].label;
const withUnit = (name) => labelOf(name) + (overview.columns[name].unit ? ` [${overview.columns[name].unit}]` : "");
const isKnown = (name) => name !== null && Object.hasOwn(overview.columns, name);
const kindOf = (name) => overview.columns[name].kind;

/** New columns; choices that they do not have any more become the usual ones. */
function setOverview(columns, isLive) {
  overview = columns;
  const names = Object.keys(overview.columns);
  varying = settingsThatVary();
  const varies = (name) => isKnown(name) && different(name).length > 1;
  const loss = isLive ? "latest_loss" : "final_loss";
  const swept = varying.filter((name) => !/seed$/.test(name) && !["fault", "mitigation", "playbook"].includes(name));
  if (!isKnown(view.x)) view.x = ["lr", "width", "fault_start", ...swept, "seed"].find(varies) || names[0];
  if (!isKnown(view.y)) view.y = view.kind === "map" ? ["mitigation", "width", "playbook", "seed", "fault"].find((name) => name !== view.x && varies(name)) || names[0] : [loss, ...VALUES].find(isKnown);
  if (!isKnown(view.colour)) view.colour = view.kind === "map" ? [loss, ...VALUES].find(isKnown) : ["mitigation", "playbook", "fault", ...swept.filter((name) => name !== view.x && different(name).length <= COLOURS.length), "outcome"].find(varies) || "outcome";
  view.filters = view.filters.filter((one) => isKnown(one.name));
  if (view.sort && !isKnown(view.sort)) view.sort = "";
}

function different(name) {
  const column = overview.columns[name];
  if (column.kind === "text") return [...new Set(column.values)].sort((a, b) => a - b).map((place) => column.words[place]);
  return [...new Set(column.values)].filter((value) => value !== null).map(Number).sort((a, b) => a - b);
}

const TESTS = {
  is: (value, wanted) => String(value ?? "") === wanted, "is not": (value, wanted) => String(value ?? "") !== wanted,
  "at least": (value, wanted) => value !== null && value >= Number(wanted), "at most": (value, wanted) => value !== null && value <= Number(wanted),
  contains: (value, wanted) => String(value ?? "").includes(wanted),
};

function passes(row) {
  return view.filters.every((one) => one.value === "" || TESTS[one.test](valueOf(one.name, row), one.value));
}

// --- the filter -------------------------------------------------------------------------------------------------

function drawFilters() {
  const box = document.getElementById("filters");
  const sets = view.filters.map((one, number) => {
    const change = (key) => (value) => { one[key] = value; if (key === "name") { one.value = ""; one.test = "is"; } view.page = 0; view.cell = null; drawFilters(); draw(); };
    const tests = kindOf(one.name) === "text" ? ["is", "is not", "contains"] : ["is", "is not", "at least", "at most"];
    const values = different(one.name).map(String);
    const hasChoice = one.test.startsWith("is") && values.length <= FEW;
    const value = hasChoice
      ? choice("value", [["", "any"], ...values.map((text) => [text, text === "" ? "(absent)" : told(kindOf(one.name) === "text" ? text : Number(text))]).filter(([key]) => key !== "")], one.value, change("value"))
      : make("label", {}, make("span", {}, "value"), typed(one, change("value")));
    const remove = make("button", { type: "button" }, "Remove");
    remove.addEventListener("click", () => { view.filters.splice(number, 1); view.page = 0; drawFilters(); draw(); document.getElementById("add-filter").focus(); });
    const set = make("fieldset", {}, make("legend", {}, `Filter ${number + 1}`));
    set.append(choice("column", columnOptions(), one.name, change("name")), choice("test", tests.map((test) => [test, test]), one.test, change("test")), value, remove);
    return set;
  });
  const at = focused(box);
  box.replaceChildren(...sets);
  if (at >= 0) controlsIn(box)[Math.min(at, controlsIn(box).length - 1)]?.focus();
}

function typed(one, change) {
  const input = make("input", { type: kindOf(one.name) === "text" ? "text" : "number", step: "any", value: one.value, size: 12 });
  input.addEventListener("change", () => change(input.value));
  return input;
}

const controlsIn = (box) => [...box.querySelectorAll("select, input, button, a")];
const focused = (box) => controlsIn(box).indexOf(document.activeElement);

function columnOptions(only = () => true) {
  const names = Object.keys(overview.columns).filter(only);
  const rank = (name) => (overview.columns[name].is_setting ? 0 : 1);
  return names.sort((a, b) => rank(a) - rank(b)).map((name) => [name, labelOf(name)]);
}

// --- the figure -------------------------------------------------------------------------------------------------

function drawAxes() {
  const box = document.getElementById("axes"), at = focused(box);
  const set = (key) => (value) => { view[key] = value; view.cursor = null; view.cell = null; if (key === "kind") { view.y = view.colour = ""; setOverview(overview, isLive); } drawAxes(); draw(); };
  box.replaceChildren(
    choice("show", [["points", "every trial"], ["map", "heat map"]], view.kind, set("kind")), choice("x", columnOptions(), view.x, set("x")), choice("y", columnOptions(), view.y, set("y")),
    choice(view.kind === "map" ? "value" : "colour", columnOptions((name) => view.kind !== "map" || kindOf(name) === "number" || name === "outcome"), view.colour, set("colour")));
  if (at >= 0) controlsIn(box)[at]?.focus();
}

/** Whether an axis is logarithmic: all its numbers are positive, and far apart. */
function isSpread(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length > 1 && known.reduce((a, b) => Math.min(a, b)) > 0 && known.reduce((a, b) => Math.max(a, b)) / known.reduce((a, b) => Math.min(a, b)) >= 20;
}

function axis(name, values) {
  const title = { text: plain(withUnit(name)) };
  return kindOf(name) === "text" ? { type: "category", title, categoryorder: "array", categoryarray: different(name).map(plain) } : { type: isSpread(values) ? "log" : "linear", title };
}

/** The settings in which trials differ, those of their faults apart. */
function settingsThatVary() {
  return Object.keys(overview.columns).filter((name) => overview.columns[name].is_setting && !name.startsWith("fault_") && different(name).length > 1);
}

function summary(row) {
  const names = varying.slice(0, 8);
  const said = [`trial ${overview.trials[row]}`, `outcome ${valueOf("outcome", row)}`, ...names.map((name) => `${labelOf(name)} ${told(valueOf(name, row))}`)];
  for (const name of VALUES) if (isKnown(name) && valueOf(name, row) !== null) said.push(`${labelOf(name)} ${told(valueOf(name, row) === Infinity ? "Infinity" : valueOf(name, row))}`);
  return said;
}

function drawFigure() {
  const rows = shownRows.slice().sort((a, b) => a - b);
  if (view.kind === "map") drawMap(rows);
  else drawPoints(rows);
}

function drawPoints(rows) {
  const known = rows.filter((row) => valueOf(view.x, row) !== null && valueOf(view.y, row) !== null);
  const finite = known.map((row) => valueOf(view.y, row)).filter(Number.isFinite);
  const yaxis = axis(view.y, finite), xaxis = axis(view.x, known.map((row) => valueOf(view.x, row)));
  const high = finite.length ? finite.reduce((a, b) => Math.max(a, b)) : 1, low = finite.length ? finite.reduce((a, b) => Math.min(a, b)) : 0;
  const top = yaxis.type === "log" ? high * (high / low) ** 0.08 : high + 0.08 * (high - low || 1);
  const place = (row, name) => { const value = valueOf(name, row); return typeof value === "string" ? plain(value) : Number.isFinite(value) ? value : name === view.y ? top : null; };
  const isLost = (row) => valueOf(view.y, row) === Infinity;
  const traceOf = (own, more) => ({
    type: "scatter", mode: "markers", x: own.map((row) => place(row, view.x)), y: own.map((row) => place(row, view.y)), customdata: own, hoverinfo: "text",
    hovertext: own.map((row) => summary(row).map(plain).join("<br>")), ...more,
    marker: { size: 8, opacity: 0.85, symbol: own.map((row) => (isLost(row) ? "x" : "circle")), ...more.marker },
  });
  let traces;
  if (kindOf(view.colour) === "text") {
    traces = different(view.colour).map((word, number) => traceOf(known.filter((row) => valueOf(view.colour, row) === word), { name: plain(word === "" ? "(absent)" : word), marker: { color: COLOURS[number % COLOURS.length] } }));
  } else {
    const colours = known.map((row) => valueOf(view.colour, row));
    const isLog = isSpread(colours);
    const color = colours.map((value) => (Number.isFinite(value) ? (isLog ? Math.log10(value) : value) : null));
    traces = [traceOf(known, { name: plain(labelOf(view.colour)), marker: { color, colorscale: "Viridis", showscale: true, colorbar: { title: { text: plain((isLog ? "log10 of " : "") + withUnit(view.colour)) } } } })];
  }
  spots = known.map((row) => ({ x: place(row, view.x), y: place(row, view.y), trials: [row], text: summary(row).join(", ") }));
  const lost = known.filter(isLost).length, unknown = rows.length - known.length;
  const said = [lost ? `×: ${lost} that became non-finite, drawn above all others.` : "", unknown ? `Not drawn: ${unknown} of which ${labelOf(view.x)} or ${labelOf(view.y)} is not known.` : ""];
  finish(traces, { xaxis, yaxis }, said);
}

function drawMap(rows) {
  const xs = different(view.x), ys = different(view.y);
  const cells = ys.map(() => xs.map(() => []));
  for (const row of rows) {
    const x = xs.indexOf(valueOf(view.x, row)), y = ys.indexOf(valueOf(view.y, row));
    if (x >= 0 && y >= 0) cells[y][x].push(row);
  }
  const isOutcome = kindOf(view.colour) === "text", name = (value) => plain(value === "" ? "(absent)" : told(value));
  const known = (own) => own.map((row) => valueOf(view.colour, row)).filter((one) => one !== null && one !== "unfinished");
  const value = (own) => {
    const values = known(own);
    if (isOutcome) return values.length ? values.filter((one) => one === "trained").length / values.length : null;
    const finite = values.filter(Number.isFinite);
    return finite.length ? finite.reduce((a, b) => a + b) / finite.length : null;
  };
  const written = (own) => {
    const found = value(own), lost = isOutcome ? 0 : known(own).filter((one) => !Number.isFinite(one)).length;
    const number = found === null ? "" : isOutcome ? `${Math.round(100 * found)}%` : told(Number(found.toPrecision(3)));
    return lost ? `${number} ×${lost}`.trim() : number;
  };
  spots = [];
  const texts = cells.map((line, j) => line.map((own, i) => {
    const said = [`${labelOf(view.x)} ${told(xs[i])}`, `${labelOf(view.y)} ${told(ys[j])}`, `${own.length} trials`, `${isOutcome ? "share trained" : `mean ${labelOf(view.colour)}`} ${written(own) || "not known yet"}`];
    if (own.length) spots.push({ x: name(xs[i]), y: name(ys[j]), trials: own, text: said.join(", ") });
    return own.length ? said.map(plain).join("<br>") : "no trial";
  }));
  const heat = {
    type: "heatmap", x: xs.map(name), y: ys.map(name), z: cells.map((line) => line.map(value)),
    text: cells.map((line) => line.map(written)), texttemplate: xs.length * ys.length <= 150 ? "%{text}" : "", hoverinfo: "text", hovertext: texts, xgap: 2, ygap: 2,
    colorscale: isOutcome ? [[0, "#d55e00"], [0.5, "#f2e6b1"], [1, "#0173b2"]] : "Viridis", reversescale: !isOutcome, ...(isOutcome ? { zmin: 0, zmax: 1 } : {}), colorbar: { title: { text: plain(isOutcome ? "share trained" : withUnit(view.colour)) } },
  };
  const category = (name_, values) => ({ type: "category", title: { text: plain(withUnit(name_)) }, categoryorder: "array", categoryarray: values.map(name) });
  finish([heat], { xaxis: category(view.x, xs), yaxis: category(view.y, ys), showlegend: false }, [isOutcome ? "Each cell is the share of its finished trials that ended as trained." : "Each cell is the mean over its trials; ×2: two more, which became non-finite, are not in it. Empty: nothing is known yet."]);
}

function finish(traces, axes, said) {
  const box = document.getElementById("figure");
  const cursor = spots[view.cursor];
  traces.push({ type: "scatter", mode: "markers", x: cursor ? [cursor.x] : [], y: cursor ? [cursor.y] : [], hoverinfo: "skip", showlegend: false, marker: { size: 20, symbol: "circle-open", color: "#000", line: { width: 3 } } });
  const legend = traces.length > 16 ? { showlegend: false } : {};
  Plotly.react(box, traces, layout({ ...axes, ...legend }), CONFIG);
  document.getElementById("caption").textContent = ["Click a point, or walk with the arrow keys and press Enter, to open the trial.", ...said].filter(Boolean).join(" ");
  if (!box.hasClick) {
    box.hasClick = true;
    box.on("plotly_click", ({ points: [point] }) => {
      if (point.data.type !== "heatmap") return point.customdata === undefined ? undefined : openRows([point.customdata]);
      openRows(spots.find((spot) => spot.x === point.x && spot.y === point.y)?.trials || []);
    });
  }
}

/** One trial is opened; of several the list is shown. */
function openRows(rows) {
  if (rows.length === 1) location.hash = `trial=${overview.trials[rows[0]]}`;
  else if (rows.length) {
    view.cell = new Set(rows);
    view.page = 0;
    draw();
    document.querySelector("#list tbody a")?.focus();
  }
}

function walk(event) {
  const order = spots.map((_, number) => number).sort((a, b) => compare(spots[a].x, spots[b].x) || compare(spots[a].y, spots[b].y));
  const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
  if (event.key === "Enter" && spots[view.cursor]) openRows(spots[view.cursor].trials);
  else if (event.key in moves && order.length) {
    const at = order.indexOf(view.cursor);
    view.cursor = order[at < 0 ? 0 : (at + moves[event.key] + order.length) % order.length];
    say(spots[view.cursor].text);
    drawFigure();
  } else return;
  event.preventDefault();
}

function compare(a, b) {
  const isNumber = (value) => typeof value === "number" || (typeof value === "string" && value !== "" && Number.isFinite(Number(value)));
  if (isNumber(a) !== isNumber(b)) return isNumber(a) ? -1 : 1; // beside numbers a level may be null
  return isNumber(a) ? a - b : String(a).localeCompare(String(b));
}

// --- the list ---------------------------------------------------------------------------------------------------

function chosenRows() {
  const rows = overview.trials.map((_, row) => row).filter((row) => passes(row) && (!view.cell || view.cell.has(row)));
  if (!view.sort) return rows;
  const order = rows.map((row) => [valueOf(view.sort, row), row]);
  order.sort(([a, i], [b, j]) => (a === null) - (b === null) || (view.isDown ? -1 : 1) * compare(a, b) || i - j);
  return order.map(([, row]) => row);
}

function drawList() {
  const became = ["outcome", ...VALUES, "nonfinite_step", "strikes", "changes", "incidents"].filter(isKnown);
  const names = [...varying.slice(0, 8), ...became];
  const pages = Math.max(1, Math.ceil(shownRows.length / ROWS));
  view.page = Math.min(view.page, pages - 1);
  const part = shownRows.slice(view.page * ROWS, (view.page + 1) * ROWS);
  const head = names.map((name) => {
    const sort = make("button", { type: "button", title: overview.columns[name].about }, `${labelOf(name)}${view.sort === name ? (view.isDown ? " ↓" : " ↑") : ""}`);
    sort.addEventListener("click", () => { view.isDown = view.sort === name && !view.isDown; view.sort = name; view.page = 0; draw(); });
    return make("th", { scope: "col", "aria-sort": view.sort === name ? (view.isDown ? "descending" : "ascending") : "none" }, sort);
  });
  const body = part.map((row) => make("tr", {}, make("th", { scope: "row" }, make("a", { href: `#trial=${overview.trials[row]}` }, overview.trials[row])), ...names.map((name) => make("td", {}, told(valueOf(name, row) === Infinity ? "Infinity" : valueOf(name, row))))));
  const box = document.getElementById("list"), at = focused(box), link = document.activeElement?.hash;
  const turn = (text, by, isOff) => { const button = make("button", { type: "button", disabled: isOff }, text); button.addEventListener("click", () => { view.page += by; draw(); }); return button; };
  const whole = make("button", { type: "button" }, "Show all again");
  whole.addEventListener("click", () => { view.cell = null; draw(); });
  const turns = pages > 1 ? [turn("Earlier", -1, view.page === 0), ` ${view.page * ROWS + 1} to ${view.page * ROWS + part.length} `, turn("Later", 1, view.page === pages - 1)] : [];
  box.replaceChildren(
    make("p", { id: "count" }, `${shownRows.length} of ${overview.trials.length} trials${view.cell ? ", those of one cell of the heat map" : ""}. `, ...(view.cell ? [whole] : []), ...turns),
    make("div", { className: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "trial"), ...head)), make("tbody", {}, ...body))));
  if (at >= 0) ((link && box.querySelector(`a[href="${link}"]`)) || controlsIn(box)[Math.min(at, controlsIn(box).length - 1)])?.focus();
}

/** The arrow keys move from trial to trial; Enter opens, as it does any link. */
function walkList(event) {
  const links = [...document.querySelectorAll("#list tbody a")], at = links.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
  if (at < 0 || to === undefined || !links[to]) return;
  links[to].focus();
  event.preventDefault();
}

function draw() {
  shownRows = chosenRows();
  drawFigure();
  drawList();
  onShown();
}
