/* The overview: leaders, ranks over tasks, scores against budget, bytes and time. */
"use strict";

const report = mmkv.values.report, views = report.views, entries = mmkv.rows(report.entries);
const byView = views.map(() => []);
for (const entry of entries) byView[entry.view].push(entry);
const numbers = new Map(distinct(entries.map((entry) => entry.method)).map((name, i) => [name, i]));

const families = new Map();
views.forEach((view, i) => {
  const key = JSON.stringify([view.store, view.family, view.metric, view.axis]);
  if (!families.has(key)) families.set(key, []);
  families.get(key).push(i);
});
const familyKeys = [...families.keys()];

function familyWords(members) {
  const view = views[members[0]], store = report.stores.length > 1 ? ` · ${report.stores[view.store].rows}` : "";
  return `${view.model} · ${view.protocol} · ${view.metric} · ${view.axis} (${members.length} ${members.length > 1 ? "tasks" : "task"})${store}`;
}

function members() { return families.get(familyKeys[$("family").value]) || []; }
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

function ranks() {
  const budget = chosenBudget(), found = new Map();
  for (const i of members()) for (const entry of byView[i]) {
    if (entry.budget !== budget || entry.rank_low === null) continue;
    if (!found.has(entry.method)) found.set(entry.method, []);
    found.get(entry.method).push(entry);
  }
  const mean = (list, name) => list.reduce((sum, entry) => sum + entry[name], 0) / list.length;
  const lines = [...found].map(([method, list]) => ({ method, list, low: mean(list, "rank_low"), high: mean(list, "rank_high") }));
  lines.sort((a, b) => a.low + a.high - b.low - b.high || collator.compare(a.method, b.method));
  const single = [], thin = { x: [], y: [], text: [] };
  lines.forEach(({ list }, y) => list.forEach((entry, k) => {
    const at = lines.length - 1 - y + (list.length > 1 ? 0.6 * (k / (list.length - 1) - 0.5) : 0.25);
    single.push({ type: "line", x0: entry.rank_low - 0.12, x1: entry.rank_high + 0.12, y0: at, y1: at, line: { color: "#8a8a8a", width: 2 } });
    thin.x.push((entry.rank_low + entry.rank_high) / 2);
    thin.y.push(at);
    thin.text.push(`${views[entry.view].dataset}: rank ${rank(entry.rank_low, entry.rank_high)}, ${score(entry.value)} ${span(entry.low, entry.high)}`);
  }));
  const traces = [
    { type: "scatter", mode: "markers", x: thin.x, y: thin.y, text: thin.text, hoverinfo: "text", marker: { color: "#8a8a8a", size: 5 }, showlegend: false },
    { type: "scatter", mode: "markers", x: lines.map((l) => (l.low + l.high) / 2), y: lines.map((_, y) => lines.length - 1 - y), showlegend: false,
      error_x: { type: "data", array: lines.map((l) => (l.high - l.low) / 2), thickness: 5, width: 0, color: COLOURS[0] },
      marker: { color: COLOURS[0], size: 9 }, hoverinfo: "text",
      text: lines.map((l) => `${l.method}: ${l.low.toFixed(1)} to ${l.high.toFixed(1)} over ${l.list.length} tasks`) },
  ];
  const most = Math.max(1, ...lines.flatMap((line) => line.list.map((entry) => entry.rank_high)));
  const table = plainTable(["method", "mean lowest", "mean highest", "tasks", ...members().map((i) => views[i].dataset)],
    lines.map((l) => [l.method, l.low, l.high, String(l.list.length), ...members().map((i) => {
      const entry = l.list.find((each) => each.view === i);
      return entry ? rank(entry.rank_low, entry.rank_high) : "";
    })]));
  if (!lines.length) return nothing("ranks", "No task ranks methods at this budget: none is proven better than another, or samples failed.");
  chart("ranks", traces, { height: 90 + 34 * lines.length, shapes: single,
    xaxis: { title: { text: "rank, 1 = best" }, range: [0.5, most + 0.5], dtick: most > 20 ? 5 : 1 },
    yaxis: { tickvals: lines.map((_, y) => lines.length - 1 - y), ticktext: lines.map((l) => l.method), zeroline: false } }, table);
}

function nothing(id, words) {
  drawn.delete(id);
  if (window.Plotly && $(id).data) Plotly.purge($(id));
  const next = $(id).nextElementSibling;
  if (next && next.dataset.of === id) next.remove();
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
  const table = plainTable(["method", ...["", ...view.budgets].map((budget) => budgetWord(view, budget))],
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

function against(id, list, view, column, words, none) {
  const traces = lines(list, (entry) => entry[column], column, null, null, view);
  if (!traces.length) return nothing(id, none);
  const table = plainTable(["method", "budget", words, "ratio to full", view.metric], list.filter((entry) => entry[column] !== null).map((entry) =>
    [entry.method, budgetWord(view, entry.budget), column === "bytes" ? bytes(entry.bytes) : `${(1000 * entry.token_s).toPrecision(3)} ms`,
      entry[column === "bytes" ? "bytes_ratio" : "token_ratio"], entry.value]));
  chart(id, traces, { height: 480, xaxis: { type: "log", title: { text: words } }, yaxis: { title: { text: view.metric } } }, table);
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
  options($("family"), familyKeys.map((key, k) => [k, familyWords(families.get(key))]), place.get("family") ?? 0);
  options($("dataset"), members().map((i) => [i, views[i].dataset]), place.get("dataset") ?? "");
  chosen("family");
  $("family").addEventListener("change", () => { place.set({ budget: "" }); chosen("family"); });
  $("dataset").addEventListener("change", () => chosen("dataset"));
  $("budget").addEventListener("input", () => chosen("budget"));
}
run(start);
