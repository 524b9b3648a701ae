"use strict";
// Interaction of the report: shows and hides runs and methods, sorts tables, zooms to moments.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const byId = (id) => document.getElementById(id);
const data = read("data");
const CONFIG = {displaylogo: false, showSendToCloud: false, plotlyServerURL: "", responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
const LOG_TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 20, 50, 100, 1e3, 1e4, 1e5, 1e6];
const narrow = window.matchMedia("(max-width: 640px)").matches;
const plot = byId("curves-plot");
const figure = read("curves-figure");
const CROWD = 20;  // runs, of which more have no place in one label
const isFolded = (meta) => data.folded[meta.run] && !meta.median && !["spike", "above"].includes(meta.kind);
const hidden = new Set();  // chips
let alone = null;          // the only visible run, if any
let moment = "";           // what the label says of the spike that the curves are zoomed to
let isCut = true;          // whether the axis of the loss is the one that cuts off high losses

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
plot.on("plotly_click", (event) => {
  toggle(event.points[0].data.meta.run);
  restyle();  // in the range that is shown
});

function restyle() {
  const which = byId("which").value;
  const visible = [];
  for (const meta of metas) {
    const drawn = meta.kind === "above" ? isCut : !["rms", "max"].includes(meta.kind) || meta.kind === which;
    const isSelected = alone === null ? !hidden.has(data.chips[meta.run]) : alone === meta.run;
    visible.push(drawn && isSelected && !(meta.median && alone !== null));
  }
  const opacity = metas.map((meta) => isFolded(meta) && alone === null ? 0.3 : 1);
  const skips = byId("unified").checked && alone === null && data.labels.length > CROWD;
  const hoverinfo = metas.map((meta) => skips && isFolded(meta) ? "skip" : "all");
  Plotly.restyle(plot, {visible, opacity, hoverinfo});
  byId("selection").textContent = alone === null ? "" : data.labels[alone] + moment;
  for (const row of document.querySelectorAll("tr[data-run]")) {
    row.classList.toggle("selected", Number(row.dataset.run) === alone);
  }
}

function toggle(run) {
  alone = alone === run ? null : run;
  moment = "";
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
  alone = run;
  isCut = false;
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
  moment = ", step " + step.toLocaleString("en") +
    (isNear ? "; dashed: the RMS spike " + lead + (lead > 1 ? " steps" : " step") + " before" : "");
  restyle();
  byId("curves").scrollIntoView();
}

function whole() {
  const log = byId("log").checked;
  isCut = !log;
  moment = "";
  restyle();
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
      toggle(Number(row.dataset.run));
      whole();  // the range may be that of another run's spike
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

restyle();
const linked = location.hash.startsWith("#spike-") && byId(location.hash.slice(1));
if (linked) follow(linked);
