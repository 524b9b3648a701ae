"use strict";
// Interaction of the report: shows and hides runs and methods, sorts tables, zooms to moments.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const byId = (id) => document.getElementById(id);
const data = read("data");
const CONFIG = {displaylogo: false, showSendToCloud: false, plotlyServerURL: "", responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
const LOG_TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 20, 50, 100];
const narrow = window.matchMedia("(max-width: 640px)").matches;
const plot = byId("curves-plot");
const figure = read("curves-figure");
const CROWD = 20;  // runs, of which more have no place in one label
const isFolded = (meta) => data.folded[meta.run] && !meta.median && meta.kind !== "spike";
const hidden = new Set();  // chips
let alone = null;          // the only visible run, if any

const TYPES = {i4: Int32Array, i2: Int16Array, i1: Int8Array, f4: Float32Array, f8: Float64Array};
function numbers(array) {  // plotly.py writes arrays in base64
  if (!array.bdata) return array;
  const bytes = Uint8Array.from(atob(array.bdata), (c) => c.charCodeAt(0));
  return new TYPES[array.dtype](bytes.buffer);
}

const metas = figure.data.map((trace) => trace.meta);
for (const trace of figure.data) { trace.x = numbers(trace.x); trace.y = numbers(trace.y); }
const wholeRange = figure.layout.yaxis.range?.slice();  // plotly changes its own
const baseShapes = figure.layout.shapes || [];
if (narrow) {
  figure.layout.margin = {l: 52, r: 6, t: 36, b: 40};
  figure.layout.font.size = 11;
}
Plotly.newPlot(plot, figure.data, figure.layout, CONFIG);
plot.on("plotly_click", (event) => show(event.points[0].data.meta.run));

function restyle() {
  const which = byId("which").value;
  const visible = [];
  for (const meta of metas) {
    const drawn = (meta.kind !== "rms" && meta.kind !== "max") || meta.kind === which;
    const isSelected = alone === null ? !hidden.has(data.chips[meta.run]) : alone === meta.run;
    visible.push(drawn && isSelected && !(meta.median && alone !== null));
  }
  const opacity = metas.map((meta) => isFolded(meta) && alone === null ? 0.3 : 1);
  const skips = byId("unified").checked && alone === null && data.labels.length > CROWD;
  const hoverinfo = metas.map((meta) => skips && isFolded(meta) ? "skip" : "all");
  Plotly.restyle(plot, {visible, opacity, hoverinfo});
  byId("selection").textContent = alone === null ? "" : data.labels[alone];
  for (const row of document.querySelectorAll("tr[data-run]")) {
    row.classList.toggle("selected", Number(row.dataset.run) === alone);
  }
}

function show(run) {
  alone = alone === run ? null : run;
  restyle();
  const heat = byId("heat-run");
  if (alone !== null && heat && data.heats[run]) { heat.value = run; drawHeat(); }
}

const axes = Object.keys(figure.layout).filter((name) => name.startsWith("xaxis"));
const ofAxes = (key, value) => Object.fromEntries(axes.map((axis) => [axis + key, value]));
const rangesY = () => Object.fromEntries(Object.keys(figure.layout)
  .filter((name) => /^yaxis\d/.test(name)).map((axis) => [axis + ".autorange", true]));

function line(step, color, dash) {
  return {type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1,
          line: {color, width: 1, dash}};
}

function zoom(run, step, lead) {
  alone = null;
  show(run);
  const from = Math.max(0, step - data.around), to = step + data.around;
  const trace = figure.data[metas.findIndex((meta) => meta.run === run && meta.kind === "loss")];
  const losses = [];
  trace.x.forEach((x, i) => { if (x >= from && x <= to && isFinite(trace.y[i])) losses.push(trace.y[i]); });
  const log = byId("log").checked;
  const low = Math.min(...losses), high = Math.max(...losses), margin = 0.08 * (high - low) + 1e-9;
  const range = log ? [Math.log10(low) - 0.02, Math.log10(high) + 0.02] : [low - margin, high + margin];
  const shapes = [...baseShapes, line(step, "#D55E00", "solid")];
  const isNear = lead && lead <= data.around;
  if (isNear) shapes.push(line(step - lead, "#0072B2", "4px,3px"));
  Plotly.relayout(plot, {...ofAxes(".range", [from, to]), ...rangesY(), "yaxis.range": losses.length ? range : wholeRange, shapes});
  byId("selection").textContent = data.labels[run] + ", step " + step.toLocaleString("en") +
    (isNear ? "; dashed: the RMS spike " + lead + (lead > 1 ? " steps" : " step") + " before" : "");
  byId("curves").scrollIntoView();
}

function whole() {
  const log = byId("log").checked;
  const type = log ? "log" : "linear";
  const y = log || !wholeRange ? {"yaxis.autorange": true} : {"yaxis.range": wholeRange.slice()};
  Plotly.relayout(plot, {"yaxis.type": type, "yaxis.tickmode": log ? "array" : "auto",
                         "yaxis.tickvals": LOG_TICKS, ...ofAxes(".autorange", true), ...rangesY(),
                         shapes: baseShapes, ...y});
}

for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    const number = Number(chip.dataset.chip);
    if (!hidden.delete(number)) hidden.add(number);
    chip.setAttribute("aria-pressed", String(!hidden.has(number)));
    alone = null;
    restyle();
  });
}
byId("which").addEventListener("change", restyle);
byId("log").addEventListener("change", whole);
byId("unified").addEventListener("change", (event) => {
  restyle();
  Plotly.relayout(plot, {hovermode: event.target.checked ? "x unified" : "closest"});
});
byId("reset").addEventListener("click", () => {
  alone = null;
  hidden.clear();
  for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", "true");
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  restyle();
  whole();
});

function follow(row) {
  zoom(Number(row.dataset.run), Number(row.dataset.step), Number(row.dataset.lead) || 0);
}
for (const row of document.querySelectorAll("tr[data-run]")) {
  row.addEventListener("click", (event) => {
    if (row.dataset.step) {
      event.preventDefault();
      history.replaceState(null, "", "#" + row.id);
      follow(row);
    } else {
      show(Number(row.dataset.run));
      byId("curves").scrollIntoView();
    }
  });
}

for (const table of document.querySelectorAll(".sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.key;
    const unknown = (text) => text === "" || text === "nan";
    const order = (a, b) => {
      if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);  // last either way
      const sign = up ? 1 : -1;
      const numeric = a.trim() !== "" && b.trim() !== "" && !isNaN(a) && !isNaN(b);
      return sign * (numeric ? a - b : a.localeCompare(b));
    };
    const rows = [...table.tBodies[0].rows].sort((a, b) => order(value(a), value(b)));
    table.tBodies[0].append(...rows);
  }));
}

// Settings and results: any column of the table of runs against any other.
const rowsOfRuns = [...document.querySelectorAll(".each tbody tr")];
const runs = rowsOfRuns.map((row) => Number(row.dataset.run));
const known = (key) => key === "" || key === "nan" ? null : isNaN(key) ? key : Number(key);
const columns = new Map([...document.querySelectorAll(".each thead th")].map((head, i) =>
  [head.textContent.replaceAll("\u200b", ""), rowsOfRuns.map((row) => known(row.cells[i].dataset.key))]));
const isNumeric = (values) => values.every((value) => value === null || typeof value === "number");
const lineColors = runs.map((run) => figure.data[metas.findIndex((meta) => meta.run === run)].line.color);
const CATEGORIES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];

function drawComparison() {
  const names = ["x", "y", "color"].map((axis) => byId("compare-" + axis).value);
  const [x, y, color] = names.map((name) => columns.get(name));
  const categories = !color || isNumeric(color) ? [undefined] : [...new Set(color)];
  const traces = categories.map((category, i) => {
    const members = [...runs.keys()].filter((k) => category === undefined || color[k] === category);
    const of = (values) => members.map((k) => values[k]);
    const marker = {size: 9, line: {color: "white", width: 1}};
    if (!color) marker.color = of(lineColors);
    else if (category !== undefined) marker.color = CATEGORIES[i % CATEGORIES.length];
    else Object.assign(marker, {color: of(color), colorscale: "Viridis", showscale: true,
                                colorbar: {title: {text: names[2]}, thickness: 12, outlinewidth: 0}});
    return {type: "scatter", mode: "markers", x: of(x), y: of(y), marker, customdata: of(runs),
            name: String(category), text: of(runs).map((run) => data.labels[run]),
            hovertemplate: "%{text}<br>" + names[0] + " %{x}, " + names[1] + " %{y:.4g}<extra></extra>"};
  });
  const span = x.filter((value) => value > 0), places = [...new Set(x)].sort((a, b) => a - b);
  const isLog = isNumeric(x) && span.length === x.length && Math.max(...span) > 20 * Math.min(...span);
  const isSwept = !isNumeric(x) || (places.length < x.length && places.length < 16);
  const {gridcolor, linecolor, ticks, tickcolor} = figure.layout.xaxis;  // not the zoomed range
  Plotly.react("compare-plot", traces, {
    height: 360, template: "none", font: figure.layout.font, hovermode: "closest",
    showlegend: categories.length > 1, margin: {...figure.layout.margin, t: 12},
    xaxis: {gridcolor, linecolor, ticks, tickcolor, zeroline: false, title: {text: names[0]},
            type: isSwept ? "category" : isLog ? "log" : "linear",
            ...(isSwept && isNumeric(x) ? {categoryorder: "array", categoryarray: places} : {})},
    yaxis: {gridcolor, linecolor, zeroline: false, title: {text: names[1]}},
  }, CONFIG);
}

for (const axis of ["x", "y", "color"]) {
  const select = byId("compare-" + axis);
  const names = [...columns.keys()].filter((name) =>
    name !== "run" && (axis !== "y" || isNumeric(columns.get(name))));
  for (const name of axis === "color" ? ["method", ...names] : names) select.add(new Option(name));
  select.value = select.dataset.first;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  select.addEventListener("change", drawComparison);
}
drawComparison();
byId("compare-plot").on("plotly_click", (event) => show(event.points[0].customdata));

const COLORS = [[0, "#f7fbff"], [0.4, "#deebf7"], [0.5, "#c6dbef"], [0.62, "#fdbe85"],
                [0.72, "#e6550d"], [1, "#7f0000"]];  // pale to RMS 1, orange from 1.5, dark from 5
function drawHeat() {
  const run = Number(byId("heat-run").value), heat = data.heats[run];
  const rows = heat.rows, steps = heat.steps;
  const codes = Uint8Array.from(atob(heat.codes), (c) => c.charCodeAt(0));
  const low = Math.log10(data.low), high = Math.log10(data.high), z = [], values = [];
  for (let r = 0; r < rows.length; r++) {
    z.push(Array.from({length: steps.length}, (_, c) => {
      const code = codes[r * steps.length + c];
      return code ? low + (high - low) * (code - 1) / 254 : null;
    }));
    values.push(z[r].map((v) => v === null ? null : 10 ** v));
  }
  const short = rows.map((name) => narrow && name.length > 18 ? name.slice(0, 17) + "\u2026" : name);
  const ticks = [0.1, 0.3, 1, 2.3, 10];
  const trace = {
    type: "heatmap", x: steps, y: rows.map((_, r) => r), z, customdata: values, zmin: low, zmax: high,
    colorscale: COLORS, text: rows.map((name) => steps.map(() => name)),
    hovertemplate: "%{text}<br>from step %{x:,}: RMS %{customdata:.2f}<extra></extra>",
    colorbar: {title: {text: "RMS<sub>t</sub>", side: "top"}, thickness: narrow ? 8 : 14, outlinewidth: 0,
               tickvals: ticks.map(Math.log10), ticktext: ticks.map(String), len: 1},
  };
  const layout = {
    height: Math.max(240, 90 + (rows.length > 45 ? 13 : 17) * rows.length), template: "none",
    margin: {l: 8, r: 8, t: 36, b: 44}, font: {...figure.layout.font, size: narrow ? 10 : 12},
    xaxis: {title: {text: "step"}, tickformat: ",d", showgrid: false, ticks: "outside", zeroline: false},
    yaxis: {tickvals: rows.map((_, r) => r), ticktext: short, autorange: "reversed", automargin: true,
            showgrid: false, zeroline: false, tickfont: {size: rows.length > 45 ? 9 : 11}},
    shapes: heat.spikes.map((step) => line(step, "#000", "2px,2px")),
  };
  const target = byId("heat-plot");
  Plotly.react(target, [trace], layout, CONFIG);
  target.removeAllListeners("plotly_click");
  target.on("plotly_click", (event) => zoom(run, Math.round(event.points[0].x), 0));
}

if (byId("heat-run")) {
  drawHeat();
  byId("heat-run").addEventListener("change", drawHeat);
}
restyle();
const linked = location.hash.startsWith("#spike-") && byId(location.hash.slice(1));
if (linked) follow(linked);
