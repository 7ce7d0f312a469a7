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
  foldAtFirst();
  drawFilters();
  drawComparison();
  update();
  listen();
  followAddress();
  requestAnimationFrame(() => setTimeout(drawn));
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
