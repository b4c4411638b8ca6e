"use strict";
// Below the pointer: the value of every curve, read back from its points.
for (const svg of document.querySelectorAll("svg.curves")) {
  const [x0, x1, y0, y1] = svg.dataset.box.split(" ").map(Number);
  const [left, right, bottom, top] = svg.dataset.frame.split(" ").map(Number);
  const curves = [...svg.querySelectorAll("polyline")].map((line) => ({
    label: line.dataset.label,
    points: line.getAttribute("points").split(" ").map((point) => point.split(",").map(Number)),
  }));
  const tip = document.createElement("div");
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  tip.className = "tip";
  tip.hidden = true;
  cross.setAttribute("class", "cross");
  cross.setAttribute("visibility", "hidden");
  svg.append(cross);
  svg.after(tip);
  const show = (event) => {
    const frame = svg.getBoundingClientRect();
    const place = ((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width;
    const near = curves.map((curve) => curve.points.reduce((a, b) => (Math.abs(a[0] - place) <= Math.abs(b[0] - place) ? a : b)));
    const at = near.reduce((a, b) => (Math.abs(a[0] - place) <= Math.abs(b[0] - place) ? a : b))[0];
    const version = x0 + ((at - left) / (right - left)) * (x1 - x0);
    tip.textContent = [`${svg.dataset.x} ${Math.round(version)}`, ...curves.map((curve, number) => {
      const value = y0 + ((near[number][1] - bottom) / (top - bottom)) * (y1 - y0);
      return `${curve.label} ${Number(value.toPrecision(4))}`;
    })].join("  ·  ");
    for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", bottom], ["visibility", "visible"]]) {
      cross.setAttribute(name, value);
    }
    tip.hidden = false;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cross.setAttribute("visibility", "hidden");
  });
}
