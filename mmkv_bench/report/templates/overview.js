/* The overview: leaders, ranks over tasks, scores against budget, bytes and time. */
"use strict";

const report = mmkv.values.report, views = report.views, entries = mmkv.rows(report.entries);
const byView = views.map(() => []);
for (const entry of entries) byView[entry.view].push(entry);
const numbers = new Map(distinct(entries.map((entry) => entry.method)).map((name, i) => [name, i]));

const family = () => report.families[$("family").value] ?? report.families[0];
const familyWords = (one) => one.words + (report.stores.length > 1 ? ` · ${report.stores[one.store].rows}` : "");
const members = () => family().views;
const budgetsOf = (of) => distinct(of.flatMap((i) => views[i].budgets)).sort((a, b) => a - b);
const chosenBudget = () => budgetsOf(members())[$("budget").value] ?? "";

function leaders() {
  const budgets = budgetsOf(members()), chosen = chosenBudget();
  const rows = members().map((i) => {
    const view = views[i];
    return [el("th", { scope: "row" }, view.dataset), ...budgets.map((budget) => {
      const here = byView[i].filter((entry) => entry.budget === budget), best = here.filter((entry) => entry.best);
      const words = best.length > 3 ? `${best.length} not told apart` : best.map((entry) => entry.method).join(", ");
      const value = best.length ? score(Math[view.less_is_better ? "min" : "max"](...best.map((entry) => entry.value))) : "";
      const title = best.map((entry) => `${entry.method} ${score(entry.value)} ${span(entry.low, entry.high)}`).join("\n");
      return el("td", { class: budget === chosen ? "chosen" : null, title }, here.length ? words || "–" : "",
        value ? el("span", { class: "quiet" }, ` ${value}`) : null);
    })];
  });
  tell("leaders", plainTable(["task", ...budgets.map((budget) => budgetWord(views[members()[0]], budget))], rows));
}

/** Of the methods that compete on all tasks, best mean first: proven by `tables --ranks`, each task at its share of the error. */
function ranks() {
  const found = family().ranks[chosenBudget()];
  const apart = found && found.apart.length ? `On some of the tasks only: ${found.apart.join(", ")}.` : "";
  tell("apart", [found ? found.note.replace(/^./, (first) => first.toUpperCase()) : "", apart].filter(Boolean).join(" "));
  if (!found) return nothing("ranks", "No two methods compete at this budget on all of these tasks with the same samples.");
  const lines = found.methods.map((method, m) => ({ method, ends: found.ends.map((task) => task[m]), mean: found.means[m] }));
  lines.sort((a, b) => a.mean[0] + a.mean[1] - b.mean[0] - b.mean[1] || a.mean[1] - b.mean[1] || collator.compare(a.method, b.method));
  const single = { x: [], y: [] }, hints = { x: [], y: [], text: [] }, tasks = found.views;
  lines.forEach(({ ends }, y) => ends.forEach(([low, high], k) => {
    const at = lines.length - 1 - y + (tasks.length > 1 ? 0.6 * (k / (tasks.length - 1) - 0.5) : 0.25);
    single.x.push(low - 0.12, high + 0.12, null);
    single.y.push(at, at, null);
    hints.x.push((low + high) / 2);
    hints.y.push(at);
    hints.text.push(`${views[tasks[k]].dataset}: rank ${rank(low, high)}`);
  }));
  const grey = "#8a8a8a", middle = ({ mean: [low, high] }) => (low + high) / 2;
  const words = ({ mean: [low, high] }) => (low === high ? low.toFixed(1) : `${low.toFixed(1)}–${high.toFixed(1)}`);
  const traces = [
    { type: "scatter", mode: "lines", ...single, line: { color: grey, width: 2 }, hoverinfo: "skip", showlegend: false },
    { type: "scatter", mode: "markers", ...hints, hoverinfo: "text", marker: { color: grey, size: 5 }, showlegend: false },
    { type: "scatter", mode: "markers", x: lines.map(middle), y: lines.map((_, y) => lines.length - 1 - y), showlegend: false,
      error_x: { type: "data", array: lines.map(({ mean: [low, high] }) => (high - low) / 2), thickness: 5, width: 0, color: COLOURS[0] },
      marker: { color: COLOURS[0], size: 9 }, hoverinfo: "text",
      text: lines.map((line) => `${line.method}: mean ${words(line)} over ${tasks.length} ${tasks.length > 1 ? "tasks" : "task"}`) },
  ];
  const table = () => plainTable(["method", "mean", ...tasks.map((view) => views[view].dataset)],
    lines.map((line) => [line.method, words(line), ...line.ends.map(([low, high]) => rank(low, high))]));
  chart("ranks", traces, { height: 90 + 34 * lines.length,
    xaxis: { title: { text: "rank, 1 = best" }, range: [0.5, lines.length + 0.5], dtick: lines.length > 20 ? 5 : 1 },
    yaxis: { tickvals: lines.map((_, y) => lines.length - 1 - y), ticktext: lines.map((line) => line.method), zeroline: false } }, table);
}

function nothing(id, words) {
  undraw(id);
  tell(id, el("p", { class: "quiet" }, words));
}

/** A line per method: points are entries, x what `at` says of them. */
function lines(list, at, x, low, high, view) {
  const groups = new Map();
  for (const entry of list) {
    if (entry.value === null || at(entry) === null || at(entry) === undefined) continue;
    if (!groups.has(entry.method)) groups.set(entry.method, []);
    groups.get(entry.method).push(entry);
  }
  return [...groups].sort((a, b) => collator.compare(a[0], b[0])).map(([method, own]) => {
    const style = styleOf(numbers.get(method));
    own.sort((a, b) => at(a) - at(b));
    return {
      type: "scatter", mode: "lines+markers", name: method, x: own.map(at), y: own.map((entry) => entry.value),
      error_y: { type: "data", symmetric: false, array: own.map((entry) => (entry.high === null ? 0 : entry.high - entry.value)),
        arrayminus: own.map((entry) => (entry.low === null ? 0 : entry.value - entry.low)), thickness: 1, width: 3 },
      line: { color: style.colour, dash: style.dash, width: 2 }, marker: { symbol: style.shape, size: 8, color: style.colour },
      text: own.map((entry) => `${method}, ${budgetWord(view, entry.budget)}<br>${score(entry.value)} ${span(entry.low, entry.high)}, n = ${entry.n}` +
        `${entry.fallbacks ? `<br>${entry.fallbacks}` : ""}`), hoverinfo: "text",
    };
  });
}

function curve() {
  const i = +$("dataset").value, view = views[i], list = byView[i];
  const budgeted = lines(list.filter((entry) => entry.budget !== ""), (entry) => +entry.budget, "budget", null, null, view);
  const without = list.filter((entry) => entry.budget === "" && entry.value !== null);
  const ends = view.budgets.length ? [+view.budgets[0], +view.budgets[view.budgets.length - 1]] : [0, 1];
  const flat = without.map((entry) => ({ type: "scatter", mode: "lines", name: entry.method, x: ends, y: [entry.value, entry.value],
    line: { color: "#8a8a8a", dash: "dash", width: 2 }, hoverinfo: "text", text: `${entry.method}: ${score(entry.value)} ${span(entry.low, entry.high)}` }));
  const table = () => plainTable(["method", ...["", ...view.budgets].map((budget) => budgetWord(view, budget))],
    distinct(list.map((entry) => entry.method)).map((method) => [method, ...["", ...view.budgets].map((budget) => {
      const entry = list.find((each) => each.method === method && each.budget === budget);
      return entry ? `${score(entry.value)} ${span(entry.low, entry.high)}` : "";
    })]));
  chart("curve", [...flat, ...budgeted], { height: 520, xaxis: { type: "log", title: { text: view.axis_words }, tickvals: view.budgets.map(Number),
    ticktext: view.budgets.map((budget) => (view.axis === "fraction" ? `${+(100 * budget).toPrecision(4)} %` : budget)) }, yaxis: { title: { text: view.metric } } }, table);
  tell("notes", el("li", {}, view.caption), view.notes.map((note) => el("li", {}, note)));
  against("bytes", list, view, "bytes", "bytes held", "These rows do not tell bytes.");
  against("times", list, view, "token_s", "seconds per token", "None of these rows was timed by itself.");
}

/** The powers of two around these numbers, ten at most. */
function powers(values) {
  const low = Math.floor(Math.log2(Math.min(...values))), high = Math.ceil(Math.log2(Math.max(...values))), step = Math.ceil((high - low + 1) / 10);
  return Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, k) => 2 ** (low + k * step));
}

function against(id, list, view, column, words, none) {
  const traces = lines(list, (entry) => entry[column], column, null, null, view);
  if (!traces.length) return nothing(id, none);
  const table = () => plainTable(["method", "budget", words, "ratio to full", view.metric], list.filter((entry) => entry[column] !== null).map((entry) =>
    [entry.method, budgetWord(view, entry.budget), column === "bytes" ? bytes(entry.bytes) : `${(1000 * entry.token_s).toPrecision(3)} ms`,
      entry[column === "bytes" ? "bytes_ratio" : "token_ratio"], entry.value]));
  const ticks = column === "bytes" ? powers(traces.flatMap((trace) => trace.x)) : null;
  chart(id, traces, { height: 480, xaxis: { type: "log", title: { text: words }, ...(ticks && { tickvals: ticks, ticktext: ticks.map(bytes) }) }, yaxis: { title: { text: view.metric } } }, table);
}

function chosen(from) {
  const of = members(), budgets = budgetsOf(of), slider = $("budget");
  if (from === "family") {
    options($("dataset"), of.map((i) => [i, views[i].dataset]));
    slider.max = Math.max(0, budgets.length - 1);
    slider.disabled = budgets.length < 2;
    slider.value = Math.min(+(place.get("budget") ?? Math.floor(budgets.length / 2)), budgets.length - 1);
    tell("budgets", budgets.map((budget, k) => el("option", { value: k, label: budget })));
  }
  const word = of.length ? budgetWord(views[of[0]], chosenBudget()) : "";
  $("budget-is").textContent = word;
  slider.setAttribute("aria-valuetext", word);
  document.querySelectorAll(".budget-word").forEach((node) => { node.textContent = word; });
  document.querySelectorAll(".dataset-word").forEach((node) => { node.textContent = views[+$("dataset").value].dataset; });
  place.set({ family: $("family").value, dataset: $("dataset").value, budget: slider.value });
  if (from !== "dataset") { leaders(); ranks(); }
  if (from !== "budget") curve();
}

function start() {
  $("about").textContent = report.about;
  tell("left-out", report.left_out.map((words) => el("li", {}, words)));
  if (!views.length) {
    document.querySelectorAll("section, .filters").forEach((node) => { node.hidden = true; });
    return;
  }
  options($("family"), report.families.map((one, k) => [k, familyWords(one)]), place.get("family") ?? 0);
  options($("dataset"), members().map((i) => [i, views[i].dataset]), place.get("dataset") ?? "");
  chosen("family");
  $("family").addEventListener("change", () => { place.set({ budget: "" }); chosen("family"); });
  $("dataset").addEventListener("change", () => chosen("dataset"));
  $("budget").addEventListener("input", () => chosen("budget"));
}
run(start);
