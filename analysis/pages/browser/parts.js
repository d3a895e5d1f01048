// What every page is made of. Text reaches the document as text alone, and plotly, which reads tags in its texts, escaped.
"use strict";

/** An element with properties and children; a child that is no element is text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A text that plotly is to show as it stands. */
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** A value as a reader wants it: few digits, and words for what is no number. */
function told(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (value === "Infinity" || value === "-Infinity" || value === "NaN") return value === "NaN" ? "NaN" : value.replace("Infinity", "∞");
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(5))) : value.toExponential(3);
}

/** A table of rows of cells, in a box that scrolls by itself. */
function table(heading, rows, label, caption) {
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell instanceof Node ? cell : told(cell)))));
  const head = make("thead", {}, make("tr", {}, ...heading.map((name) => make("th", { scope: "col" }, name))));
  const title = caption ? make("caption", {}, caption) : null;
  const box = make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": label });
  box.append(make("table", {}, title, head, make("tbody", {}, ...body)));
  return box;
}

/** A labelled select; `options`: [value, words] each. */
function choice(label, options, value, change) {
  const select = make("select", {}, ...options.map(([key, words]) => make("option", { value: key }, words)));
  select.value = value;
  select.addEventListener("change", () => change(select.value));
  return make("label", {}, make("span", {}, label), select);
}

const COLOURS = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494", "#b59f00", "#56b4e9", "#222222"];
const CONFIG = { displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtonsToRemove: ["lasso2d", "select2d"] };

/** What all charts share. */
function layout(more) {
  const axis = { gridcolor: "#e4e4e4", zeroline: false, linecolor: "#999", ticks: "outside", automargin: true };
  return {
    font: { family: "system-ui, sans-serif", size: 13, color: "#222" }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    margin: { l: 60, r: 20, t: 30, b: 45 }, hovermode: "closest", hoverlabel: { align: "left" }, showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...more,
    xaxis: { ...axis, ...(more.xaxis || {}) }, yaxis: { ...axis, ...(more.yaxis || {}) },
  };
}

/** The steps of a curve: they are left out where they are 0, 1, 2, ... */
function steps(curve) {
  return curve.x === null ? curve.y.map((_, step) => step) : curve.x;
}

/** Curves against steps: `lines` have name, curve and perhaps colour, dash and trial; `marks` are shapes of the layout. */
function drawCurves(box, lines, { unit = "", isLog = false, marks = [], notes = [], last = null } = {}) {
  const lost = (line) => (lines.length > 3 && line.curve.holes.length ? ` (${line.curve.holes[0][2]} from step ${line.curve.holes[0][0]})` : "");
  const traces = lines.map((line, number) => ({
    type: "scatter", mode: line.curve.y.length < 40 ? "lines+markers" : "lines", x: steps(line.curve), y: line.curve.y, name: plain(line.name + lost(line)),
    line: { color: line.colour || COLOURS[number % COLOURS.length], width: line.width || 1.6, dash: line.dash || "solid" },
    marker: { size: 5 }, meta: line.trial, hovertemplate: "step %{x}<br>%{y:.6g}<extra>%{fullData.name}</extra>",
  }));
  const shapes = [...marks], annotations = [...notes];
  for (const line of lines.length > 3 ? [] : lines) {
    for (const [first, last, word] of line.curve.holes.slice(0, 20)) {
      shapes.push({ type: "rect", x0: first - 0.5, x1: last + 0.5, y0: 0, y1: 1, yref: "paper", line: { width: 0 }, fillcolor: "rgba(190,0,0,0.09)", layer: "below" });
      annotations.push(note(first, `${line.name}: ${word}`, 0.5 + 0.1 * lines.indexOf(line)));
    }
  }
  const axes = { xaxis: { title: { text: "step" }, ...(last === null ? { rangemode: "tozero" } : { range: [-0.01 * last, 1.01 * last] }) }, yaxis: { title: { text: plain(unit === "1" ? "" : unit) }, type: isLog ? "log" : "linear" } };
  return Plotly.react(box, traces, layout({ ...axes, shapes, annotations, showlegend: lines.length > 1 }), CONFIG);
}

/** A word at a step of a chart. */
function note(step, text, height) {
  return { x: step, y: height, yref: "paper", xanchor: "left", text: plain(text), showarrow: false, font: { size: 12, color: "#8a1500" }, bgcolor: "rgba(255,255,255,0.8)" };
}
