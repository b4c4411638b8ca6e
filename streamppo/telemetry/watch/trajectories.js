// Shows batches of the archive, and one trajectory token by token. Text from a run is never inserted as HTML.
const ORDERS = {
  batch: (a, b) => a.row - b.row,
  high: (a, b) => b.reward - a.reward,
  low: (a, b) => a.reward - b.reward,
  long: (a, b) => b.tokens - a.tokens,
  old: (a, b) => b.lag - a.lag,
};
const SHOWN_ROWS = 256;
let batch = null, opened = null;

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

const short = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

// --- a batch ----------------------------------------------------------------------------------------------------

async function showBatch(update) {
  try {
    batch = await ask(update ? `batch/${update}` : "batch");
  } catch (error) {
    byId("batch-status").textContent = error.message;
    return;
  }
  byId("batch-status").textContent = `${batch.rows.length} trajectories made version ${batch.update}`;
  for (const id of ["update", "slide"]) {
    [byId(id).min, byId(id).max] = batch.updates;
    byId(id).value = batch.update;
  }
  // The server made this drawing, which contains no text from the run.
  byId("rewards").innerHTML = batch.rewards;
  const head = [["", "mean", "lowest", "highest"].map((name) => element("th", name, name && "number"))];
  const parts = batch.parts.map((one) => [element("th", one.name), ...[one.mean, one.lowest, one.highest].map((value) => element("td", short(value), "number"))]);
  fill(byId("parts"), [...head, ...parts]);
  showList();
}

/** Show the newest batch as the run goes on, unless an update was chosen; not while it is far below the window. */
function followBatches(version) {
  const isFar = byId("list").getBoundingClientRect().top > 3 * innerHeight;
  if (!version) byId("batch-status").textContent = "no update has been made";
  else if (!batch) showBatch(Number(chosen.get("update")));
  else if (!chosen.has("update") && batch.update < version && !isFar) showBatch(null);
}

function showList() {
  const rows = [...batch.rows].sort(ORDERS[byId("order").value]).slice(0, SHOWN_ROWS);
  const head = ["prompt", "reward", "tokens", "lag", "completion"]
    .map((name, place) => element("th", name, place && place < 4 ? "number" : ""));
  fill(byId("list"), [head, ...rows.map((one) => [
    element("td", one.title),
    element("td", short(one.reward), "number"),
    element("td", one.tokens + ({ length: " cut off", cut: " segment" }[one.finish] ?? ""), "number"),
    element("td", String(one.lag), "number"),
    element("td", one.begins),
  ])]);
  [...byId("list").rows].slice(1).forEach((place, number) => {
    place.dataset.row = rows[number].row;
    place.tabIndex = 0;
  });
  markOpen();
}

function fill(table, rows) {
  table.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells);
    return row;
  }));
}

function markOpen() {
  for (const place of byId("list").querySelectorAll("tr")) {
    place.classList.toggle("open", opened?.update === batch?.update && place.dataset.row === String(opened?.row));
  }
}

// --- one trajectory ---------------------------------------------------------------------------------------------

async function openTrajectory(update, row) {
  try {
    opened = await ask(`batch/${update}/${row}`);
  } catch (error) {
    byId("batch-status").textContent = error.message;
    return;
  }
  chosen.set("update", update);
  chosen.set("row", row);
  keepChoice();
  const parts = Object.entries(opened.components).map(([name, value]) => `, ${name} ${short(value)}`).join("");
  byId("opened-title").textContent = `${opened.title}: reward ${short(opened.reward)}${parts}`;
  byId("explanation").textContent = opened.explanation;
  const told = opened.row_missing ? [["row", opened.row_missing]] : opened.row_columns;
  fill(byId("row-columns"), told.map(([name, value]) => [element("th", name), element("td", value)]));
  byId("missing").textContent = (opened.left_out ? `${opened.left_out} more tokens are not shown. ` : "") + opened.missing;
  const names = opened.columns.map((column) => column.name);
  byId("colour").replaceChildren(...names.map((name) => element("option", name)));
  byId("colour").value = names.includes(chosen.get("colour")) ? chosen.get("colour") : names[0];
  byId("prompt").textContent = opened.prompt;
  showTree();
  byId("text").replaceChildren(...opened.texts.map((text, number) => {
    const token = element("span", text.replaceAll("\n", "⏎\n") || "·", opened.sampled[number] ? "token" : "token other");
    token.dataset.token = number;
    token.tabIndex = number ? -1 : 0;
    return token;
  }));
  byId("opened").hidden = false;
  colour();
  tell(Number(chosen.get("token") ?? 0));
  markOpen();
}

/** Draw the tree of several turns: a row for each node, deeper behind a branch; a click on one goes to its first token. */
function showTree() {
  byId("tree").hidden = !opened.tree.length;
  byId("tree-title").textContent = `tree: ${opened.tree_words}`;
  byId("nodes").replaceChildren(...opened.tree.map((one) => {
    const row = element("li", "", one.received ? one.kind : `${one.kind} lost`);
    row.style.setProperty("--level", Math.min(one.level, 8));
    const head = element("span", [one.name, one.behind].filter(Boolean).join(" "), "soft");
    row.append(head, element("span", one.text, "said"), ...one.notes.map((note) => element("span", note, "note")));
    if (one.token !== null) {
      row.dataset.token = one.token;
      row.tabIndex = 0;
    }
    return row;
  }));
}

/** Go from a node to its first token. */
function onNode(event) {
  const place = event.target.closest("li[data-token]");
  if (!place || (event.type === "keydown" && event.key !== "Enter")) return;
  tell(Number(place.dataset.token));
  byId("text").querySelector(".told")?.scrollIntoView({ block: "nearest" });
}

function colour() {
  const column = opened.columns.find((one) => one.name === byId("colour").value);
  const known = column.values.filter((value) => value !== null);
  const most = Math.max(...known.map(Math.abs), 0);
  const [from, to] = {
    more: [Math.min(...known), Math.max(...known)],
    less: [Math.min(...known, 0), 0],
    both: [-most, most],
  }[column.kind];
  const wide = to - from || 1;
  const deep = {
    more: (value) => (value - from) / wide,
    less: (value) => (to - value) / wide,
    both: (value) => Math.abs(value) / (most || 1),
  }[column.kind];
  for (const token of byId("text").querySelectorAll(".token")) {
    const value = column.values[token.dataset.token];
    token.style.setProperty("--deep", value === null ? 0 : deep(value));
    token.classList.toggle("below", column.kind === "both" && value < 0);
  }
  byId("scale").replaceChildren(element("span", short(from)), element("i", "", column.kind), element("span", short(to)));
}

/** Write down every number of one token. */
function tell(number) {
  const tokens = [...byId("text").querySelectorAll(".token")];
  const told = tokens[number];
  if (!told) return;
  for (const token of tokens) token.classList.toggle("told", token === told);
  chosen.set("token", number);
  keepChoice();
  const name = `token ${number + 1} of ${opened.texts.length + opened.left_out}`;
  const isLost = opened.lost.some(([start, end]) => start <= number && number < end);
  const remark = opened.sampled[number] ? "" : isLost ? ", sampled but not received" : ", not sampled by the policy";
  const rows = [[name, JSON.stringify(opened.texts[number]), `id ${opened.ids[number]}${remark}`]];
  for (const column of opened.columns) rows.push([column.name, short(column.values[number]), column.help]);
  fill(byId("numbers"), rows.map(([a, b, c]) => [element("td", a), element("td", b, "number"), element("td", c, "soft")]));
}

// --- events of the page ---------------------------------------------------------------------------------------------

function onRow(event) {
  const place = event.target.closest("tr[data-row]");
  if (place && (event.type === "click" || event.key === "Enter")) {
    chosen.delete("token");
    openTrajectory(batch.update, Number(place.dataset.row));
  }
}

function startTrajectories() {
  byId("list").addEventListener("click", onRow);
  byId("list").addEventListener("keydown", onRow);
  byId("nodes").addEventListener("click", onNode);
  byId("nodes").addEventListener("keydown", onNode);
  byId("text").addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token) tell(Number(token.dataset.token));
  });
  byId("text").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = by && byId("text").querySelector(`[data-token="${Number(chosen.get("token")) + by}"]`);
    if (!next) return;
    event.preventDefault();
    next.focus();
    tell(Number(next.dataset.token));
  });
  byId("colour").addEventListener("change", () => {
    chosen.set("colour", byId("colour").value);
    keepChoice();
    colour();
  });
  byId("order").addEventListener("change", () => batch && showList());
  for (const id of ["update", "slide"]) {
    byId(id).addEventListener("change", () => {
      chosen.set("update", byId(id).value);
      chosen.delete("row");
      keepChoice();
      showBatch(Number(byId(id).value));
    });
  }
  byId("newest").addEventListener("click", () => {
    for (const name of ["update", "row", "token"]) chosen.delete(name);
    keepChoice();
    showBatch(null);
  });
  if (chosen.has("row")) openTrajectory(Number(chosen.get("update")), Number(chosen.get("row")));
}
