// Filter the table of laws and engines. The address keeps the filters: index.html#engine=ddp&failing=1
"use strict";

const BROKEN = ["fail", "crash", "hang", "stale", "error", "undetermined", "leak", "excused"];
const form = document.getElementById("filters");
const heads = [...document.querySelectorAll("#laws .releases th")];
const spans = [...document.querySelectorAll("#laws .engines th")];
const engines = heads.map((head) => head.dataset.engine);
const rows = [...document.querySelectorAll("#laws tbody tr")].map((element) => ({
  element,
  group: element.dataset.group,
  isGroup: element.classList.contains("group"),
  cells: [...element.children],
  outcomes: [...element.children].map((cell) => cell.className.replace(/^o-/, "")),
  marks: [...element.children].map((cell) => cell.querySelector(".only") !== null),
}));

/** Set the controls to what the address says; a value that no control has is ignored. */
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const control of form.elements) {
    if (control.type === "checkbox") control.checked = wanted.get(control.name) === control.value;
    else if (control.tagName === "SELECT") {
      const value = wanted.get(control.name) ?? "";
      control.value = [...control.options].some((option) => option.value === value) ? value : "";
    }
  }
  show();
}

/** Write the controls that filter into the address, without an entry in the history. */
function writeAddress() {
  const chosen = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", `#${chosen}`);
  show();
}

/** Return whether one of the shown squares of a law is what the filters ask for. */
function matches(row, filter, shown) {
  const some = (test) => row.outcomes.some((outcome, i) => shown[i] && i > 0 && test(outcome, i));
  return (
    (!filter.group || row.group === filter.group) &&
    (!filter.engine || some((outcome) => outcome !== "none")) &&
    (!filter.verdict || some((outcome) => outcome === filter.verdict)) &&
    (!filter.failing || some((outcome) => BROKEN.includes(outcome))) &&
    (!filter.only || some((_, i) => row.marks[i]))
  );
}

/** Hide the columns and rows that the filters leave out; a group is shown with any of its laws. */
function show() {
  const filter = Object.fromEntries(new FormData(form));
  const shown = engines.map((engine) => !engine || !filter.engine || engine === filter.engine);
  heads.forEach((head, i) => (head.hidden = !shown[i]));
  for (const span of spans) span.hidden = Boolean(filter.engine) && span.dataset.name !== filter.engine;
  const laws = rows.filter((row) => !row.isGroup);
  const found = laws.filter((row) => matches(row, filter, shown));
  const kept = new Set(found);
  const groups = new Set(found.map((row) => row.group));
  for (const row of rows) {
    row.element.hidden = !(row.isGroup ? groups.has(row.group) : kept.has(row));
    row.cells.forEach((cell, i) => (cell.hidden = !shown[i]));
  }
  const columns = shown.filter(Boolean).length - 1;
  document.getElementById("count").textContent =
    `${found.length} of ${laws.length} laws, ${columns} of ${engines.length - 1} engine releases shown`;
}

form.addEventListener("change", writeAddress);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(writeAddress));
addEventListener("hashchange", readAddress);
readAddress();
performance.mark("interactive");
