/* One sample: what was asked, what every cell answered, and which visual tokens it kept. */
"use strict";

let group = null, answers = null, number = 0, full = -1;
const valueOf = (i) => answers.values[$("metric").value]?.[i] ?? null;

const TESTS = {
  all: () => true,
  lower: (i) => compared(i) < 0,
  higher: (i) => compared(i) > 0,
  differ: (i) => full >= 0 && answers.answer[i] !== answers.answer[full],
};
function compared(i) {
  if (full < 0 || valueOf(i) === null || valueOf(full) === null) return 0;
  return (group.less_is_better.includes($("metric").value) ? -1 : 1) * (valueOf(i) - valueOf(full));
}

function show() {
  const budget = $("budget").value, base = full < 0 ? null : answers.answer[full];
  const wanted = group.cells.map((_, i) => i).filter((i) => (i === full || budget === "" || group.cells[i].budget === budget) && (i === full || TESTS[$("which").value](i)) && answers.status[i] !== null);
  place.set({ budget, metric: $("metric").value, which: $("which").value });
  tell("answers", plainTable(["method", "budget", "answer", "score", "leaves full", "counted entries, all heads", "remarks"], wanted.map((i) => {
    const cell = group.cells[i];
    return [el("td", {}, el("a", { href: `cell.html#cell=${cell.name}` }, `${cell.label}${cell.seed === null ? "" : `, seed ${cell.seed}`}`)), cell.budget || "–",
      el("td", {}, answerNode(answers.answer[i], answers.status[i], base, answers.error[i])), el("td", {}, valueNode(valueOf(i))),
      i === full ? "" : token(answers.differs[i]), answers.resident[i] === null ? "" : String(answers.resident[i]), answers.fallback[i]];
  }), `${wanted.length} of ${group.cells.length} cells`));
}

async function start() {
  group = await groupOf(place.get("group"));
  number = Math.max(0, Math.min(group.samples.length - 1, +place.get("sample") || 0));
  const sample = group.samples[number];
  answers = await mmkv.load(`answers/${place.get("group")}-${number}`);
  full = group.cells.findIndex((cell) => cell.full);
  document.title = `${sample.id} · mmkv_bench report`;
  $("title").textContent = sample.id;
  $("where").textContent = `${group.dataset}, model ${group.model}, protocol ${group.protocol}; sample ${number + 1} of ${group.samples.length} in this report (${group.total} in the rows).`;
  const to = (k, words) => (k >= 0 && k < group.samples.length ? [el("a", { href: `sample.html#group=${place.get("group")}&sample=${k}` }, words), " "] : []);
  tell("links", [...to(number - 1, "previous sample"), ...to(number + 1, "next sample")]);
  tell("images", pictures(sample, sample.images.length > 1 ? 300 : 480));
  $("question").textContent = sample.question ?? "";
  $("reference").textContent = sample.reference ?? "";
  $("missing").textContent = sample.missing;
  options($("budget"), [["", "all"], ...distinct(group.cells.map((cell) => cell.budget).filter(Boolean)).map((budget) => [budget, budget])], place.get("budget") ?? "");
  options($("metric"), group.metrics.map((metric) => [metric, metric]), place.get("metric") ?? group.metrics[0]);
  if (place.get("which")) $("which").value = place.get("which");
  for (const id of ["budget", "metric", "which"]) $(id).addEventListener("change", () => run(show));
  show();
  place.set({ sample: number });
  await keptMaps(group, sample);
  document.body.dataset.ready = "sample";
}
run(start);
