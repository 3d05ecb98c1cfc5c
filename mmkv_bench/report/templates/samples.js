/* The samples of a cell beside those of another one, the full cache by default. */
"use strict";

const MOST = 200;  // rows at a time
let group = null, cells = {}, rows = [];

const metricSign = () => (group.less_is_better.includes($("metric").value) ? -1 : 1);
const value = (side, i) => cells[side].answers?.values[$("metric").value]?.[i] ?? null;
const text = (side, i) => cells[side].answers?.answer[i] ?? null;
const status = (side, i) => cells[side].answers?.status[i] ?? null;

const TESTS = {
  all: () => true,
  a: (i) => value("a", i) !== null && value("b", i) !== null && metricSign() * (value("a", i) - value("b", i)) > 0,
  b: (i) => value("a", i) !== null && value("b", i) !== null && metricSign() * (value("b", i) - value("a", i)) > 0,
  same: (i) => value("a", i) !== null && value("a", i) === value("b", i),
  differ: (i) => text("a", i) !== text("b", i),
  failed: (i) => [status("a", i), status("b", i)].some((word) => word !== null && word !== "ok"),
};

function row(i) {
  const sample = group.samples[i], full = cells.full?.answers?.answer[i] ?? null;
  const link = el("a", { href: `sample.html#group=${place.get("group")}&sample=${i}` }, sample.id);
  const one = (side) => [el("div", {}, answerNode(text(side, i), status(side, i), full, cells[side].answers?.error[i])), el("div", {}, valueNode(value(side, i)),
    " ", el("span", { class: "quiet" }, cells[side].answers?.differs ? `leaves full: ${token(cells[side].answers.differs[i])}` : ""))];
  return [el("td", {}, link, el("div", { class: "thumbs" }, pictures(sample, 90))), el("td", { class: "words" }, sample.question ?? el("span", { class: "quiet" }, sample.missing)),
    el("td", { class: "words" }, sample.reference ?? ""), el("td", {}, one("a")), el("td", {}, one("b"))];
}

async function show() {
  for (const side of ["a", "b"]) cells[side] = await mmkv.load(`cells/${$(side).value}`);
  const full = group.cells.find((cell) => cell.full);
  cells.full = full ? await mmkv.load(`cells/${full.name}`) : null;
  rows = group.samples.map((_, i) => i).filter(TESTS[$("which").value]);
  place.set({ cell: $("a").value, other: $("b").value, metric: $("metric").value, which: $("which").value });
  const left = group.total > group.samples.length ? ` The report shows the first ${group.samples.length} of the dataset's ${group.total}.` : "";
  $("shown").textContent = `${rows.length} of ${group.samples.length} samples${rows.length > MOST ? `, the first ${MOST} of these` : ""}.${left}`;
  tell("samples", plainTable(["sample", "question", "reference", `A: ${$("a").selectedOptions[0].text}`, `B: ${$("b").selectedOptions[0].text}`], rows.slice(0, MOST).map(row)));
  document.body.dataset.ready = "samples";
}

async function start() {
  const cell = await mmkv.load(`cells/${String(place.get("cell")).replace(/[^A-Za-z0-9_-]/g, "")}`);
  group = await groupOf(cell.group);
  place.set({ group: cell.group });
  $("title").textContent = `Samples of ${group.dataset}`;
  $("where").textContent = `Model ${group.model}, protocol ${group.protocol}, ${group.cells.length} cells that answered them.`;
  const pairs = group.cells.map((each) => [each.name, cellWords(each)]), full = group.cells.find((each) => each.full) ?? group.cells[0];
  options($("a"), pairs, place.get("other") ? place.get("cell") : full.name);
  options($("b"), pairs, place.get("other") ?? place.get("cell"));
  options($("metric"), group.metrics.map((metric) => [metric, metric]), place.get("metric") ?? group.metrics[0]);
  if (place.get("which")) $("which").value = place.get("which");
  for (const id of ["a", "b", "metric", "which"]) $(id).addEventListener("change", () => run(show));
  $("swap").addEventListener("click", () => { [$("a").value, $("b").value] = [$("b").value, $("a").value]; run(show); });
  await show();
}
run(start);
