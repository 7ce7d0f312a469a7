// The filters, which select the records that are shown.

const AXES = [
  ["group", "Group", (record) => record.group],
  ["engine", "Engine", (record) => `${record.engine} ${record.version}`],
  ["stage", "Stage", (record) => String(record.stage)],
  ["dtype", "Dtype", (record) => record.dtype],
  ["world", "Ranks", (record) => String(record.world_size)],
];

/** Build the choices of every axis, and a button for each outcome that occurs. */
function drawFilters() {
  for (const [name, label, value] of AXES) {
    const values = [...new Set(page.records.map(value))];
    const choices = [
      make("option", { value: "" }, "all"),
      ...values.map((each) => make("option", { value: each }, each)),
    ];
    $("axes").append(
      make("label", {}, label, make("select", { id: `axis-${name}`, disabled: values.length < 2 }, choices)),
    );
  }
  for (const [word, glyph, meaning] of page.outcomes) {
    const count = page.records.filter((record) => record.outcome === word).length;
    if (!count) continue;
    $("outcomes").append(
      make(
        "button",
        {
          type: "button",
          "aria-pressed": "true",
          "data-outcome": word,
          title: `${word}: ${meaning}`,
          click: () => toggleOutcome(word),
        },
        mark(word, glyph),
        ` ${word} ${count.toLocaleString("en")}`,
      ),
    );
  }
  let waiting;
  $("text").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 60);
  });
  $("axes").addEventListener("change", update);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("reset", () => setTimeout(() => (view.off.clear(), update())));
}

/** Show only ``word`` at the first click on an outcome, then add or remove outcomes; without any, show all. */
function toggleOutcome(word) {
  const words = page.outcomes.map(([each]) => each);
  if (!view.off.size) words.filter((each) => each !== word).forEach((each) => view.off.add(each));
  else if (!view.off.delete(word)) view.off.add(word);
  if ([...document.querySelectorAll("[data-outcome]")].every((button) => view.off.has(button.dataset.outcome)))
    view.off.clear();
  update();
}

/** Return the records that pass every filter. */
function filterRecords() {
  const wanted = $("text").value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = AXES.map(([name, , value]) => [$(`axis-${name}`).value, value]).filter(([text]) => text);
  return page.records.filter(
    (record) =>
      !view.off.has(record.outcome) &&
      chosen.every(([text, value]) => value(record) === text) &&
      wanted.every((word) => haystack(record).includes(word)),
  );
}

/** Redraw the page with the filtered records. */
function update() {
  view.records = filterRecords();
  for (const button of document.querySelectorAll("[data-outcome]")) {
    button.setAttribute("aria-pressed", String(!view.off.has(button.dataset.outcome)));
  }
  const all = page.records.length;
  $("count").textContent = `${view.records.length.toLocaleString("en")} of ${plural(all, "cell")} shown`;
  drawMatrix();
  drawList();
}
