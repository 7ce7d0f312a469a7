// Start the page.

/** Decode the data and draw the page. */
async function main() {
  const data = await unpack($("data").textContent);
  $("data").remove();
  page.outcomes = data.outcomes;
  page.glyphs = new Map(data.outcomes.map(([word, glyph]) => [word, glyph]));
  page.order = new Map(data.outcomes.map(([word], i) => [word, i]));
  page.laws = data.laws;
  page.step = data.step;
  page.comparison = data.comparison;
  page.records = prepareRecords(data.records);
  page.byKey = new Map(page.records.map((record) => [record.key, record]));
  if (data.skipped.length) {
    $("skipped").hidden = false;
    $("skipped").append(
      make(
        "li",
        {},
        make(
          "strong",
          {},
          `${plural(data.skipped.length, "line")} skipped, which ${data.skipped.length === 1 ? "is not a record" : "are not records"}`,
        ),
      ),
      ...data.skipped.slice(0, 20).map((line) => make("li", {}, line)),
    );
  }
  drawLegend();
  foldAtFirst();
  drawFilters();
  drawComparison();
  update();
  listen();
  followAddress();
  openLoneFailure();
  requestAnimationFrame(() => setTimeout(drawn));
}

/** List every sign of the matrix with its meaning. */
function drawLegend() {
  const sign = (text, classes = "") => make("span", { class: `sign ${classes}`, "aria-hidden": "true" }, text);
  const entries = page.outcomes.map(([word, glyph, meaning]) => [mark(word, glyph), `${word}: ${meaning}`]);
  entries.push(
    [sign(":", "o-pass"), "the laws hold where the engine supports them, and other cells of the square are unsupported"],
    [sign(page.glyphs.get("fail"), "o-fail part"), "underlined: the cells of the square have several outcomes"],
    [sign(""), "an empty square: the run had no such cell"],
  );
  $("legend")
    .querySelector("dl")
    .append(...entries.flatMap(([shown, meaning]) => [make("dt", {}, shown), make("dd", {}, meaning)]));
}

/** Open the only unexpected cell of the page, unless the address names another. */
function openLoneFailure() {
  const failures = page.records.filter((record) => !record.expected);
  if (failures.length === 1 && !location.hash) openCell(failures[0]);
}

/** Set a performance mark once the first frame is drawn, for scripts/bench_report.py. */
function drawn() {
  performance.mark("interactive");
  document.documentElement.dataset.drawn = "";
}

/** Register event listeners. */
function listen() {
  $("matrix").addEventListener("click", matrixClick);
  $("matrix").addEventListener("keydown", gridKey);
  $("unfold").addEventListener("click", () => foldAll(false));
  $("fold").addEventListener("click", () => foldAll(true));
  $("more").addEventListener("click", drawMore);
  new IntersectionObserver(([seen]) => seen.isIntersecting && !$("more").hidden && drawMore()).observe($("more"));
  document.addEventListener("keydown", pageKey);
  window.addEventListener("hashchange", followAddress);
}

main();
