"use strict";
// Shows the value of every curve at the pointer, read from its points. The page may replace charts meanwhile.
const charts = new WeakMap();

function chartOf(svg) {
  if (charts.has(svg)) return charts.get(svg);
  const [x0, x1, y0, y1] = svg.dataset.box.split(" ").map(Number);
  const [left, right, bottom, top] = svg.dataset.frame.split(" ").map(Number);
  const curves = [...svg.querySelectorAll("polyline[data-label]")].map((line) => ({
    label: line.dataset.label,
    points: line.getAttribute("points").split(" ").map((point) => point.split(",").map(Number)),
  }));
  const tip = document.createElement("div");
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  tip.className = "tip";
  cross.setAttribute("class", "cross");
  svg.append(cross);
  svg.after(tip);
  const chart = { x0, x1, y0, y1, left, right, bottom, top, curves, tip, cross };
  charts.set(svg, chart);
  return chart;
}

function showValues(svg, clientX) {
  const { x0, x1, y0, y1, left, right, bottom, top, curves, tip, cross } = chartOf(svg);
  const frame = svg.getBoundingClientRect();
  const place = ((clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width;
  const nearer = (a, b) => (Math.abs(a[0] - place) <= Math.abs(b[0] - place) ? a : b);
  const near = curves.map((curve) => curve.points.reduce(nearer));
  const at = near.reduce(nearer)[0];
  const x = x0 + ((at - left) / (right - left)) * (x1 - x0);
  tip.textContent = [`${svg.dataset.x} ${Math.round(x)}`, ...curves.map((curve, number) => {
    const value = y0 + ((near[number][1] - bottom) / (top - bottom)) * (y1 - y0);
    return `${curve.label} ${Number(value.toPrecision(4))}`;
  })].join("  ·  ");
  for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", bottom]]) {
    cross.setAttribute(name, value);
  }
}

let shown = null, pointer = null;

function hideValues() {
  if (!shown) return;
  for (const part of [charts.get(shown).tip, charts.get(shown).cross]) part.remove();
  charts.delete(shown);
  shown = null;
}

function point(target, clientX) {
  const svg = target instanceof Element ? target.closest("svg.curves") : null;
  if (svg !== shown) hideValues();
  shown = svg;
  if (svg) showValues(svg, clientX);
}

for (const kind of ["pointermove", "pointerdown"]) {
  document.addEventListener(kind, (event) => {
    pointer = [event.clientX, event.clientY];
    point(event.target, event.clientX);
  }, true);
}
document.documentElement.addEventListener("pointerleave", hideValues);
