// Requests the sections of the page repeatedly. The address has the choice of runs and of a trajectory.
const byId = (id) => document.getElementById(id);
const chosen = new URLSearchParams(location.hash.slice(1));
let tag = "", timer = 0, asked = 0;

function keepChoice() {
  history.replaceState(null, "", `#${chosen}`);
}

async function ask(path) {
  const response = await fetch(path, { cache: "no-store" });
  const answer = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

/** Replace a section that is another text than before; unfolded parts stay so, and scrolled ones where they are. */
function swap(id, html) {
  const place = byId(id);
  if (place.html === html) return;
  const open = [...place.querySelectorAll("details")].map((one) => one.open);
  const scrolled = [...place.querySelectorAll(".wide")].map((one) => one.scrollLeft);
  place.html = html;
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((one, number) => { one.open = open[number] ?? false; });
  place.querySelectorAll(".wide").forEach((one, number) => { one.scrollLeft = scrolled[number] ?? 0; });
}

async function look() {
  clearTimeout(timer);
  const number = ++asked;
  let again = 5;
  try {
    const runs = chosen.getAll("with").map((name) => ["with", name]);
    const answer = await ask(`sections?${new URLSearchParams([["tag", tag], ...runs])}`);
    if (number !== asked) return;
    tag = answer.tag;
    again = answer.again_s;
    for (const [id, html] of Object.entries(answer.sections ?? {})) swap(id, html);
    if (answer.sections) {
      if (pointer) point(document.elementFromPoint(...pointer), pointer[0]);
      followBatches(answer.version);
    }
    byId("status").textContent = `as of ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    if (number !== asked) return;
    byId("status").textContent = `no answer (${error.message}): the page shows the last one`;
  }
  if (!document.hidden) timer = setTimeout(look, again * 1000);
}

function compare(boxes) {
  chosen.delete("with");
  for (const box of boxes) if (box.checked) chosen.append("with", box.value);
}

function start() {
  const boxes = [...document.querySelectorAll('input[name="with"]')];
  if (chosen.has("with")) for (const box of boxes) box.checked = chosen.getAll("with").includes(box.value);
  compare(boxes);
  if (chosen.has("with")) byId("others").open = true;
  for (const box of boxes) {
    box.addEventListener("change", () => {
      compare(boxes);
      keepChoice();
      look();
    });
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
  startTrajectories();
  look();
}
document.addEventListener("DOMContentLoaded", start);
