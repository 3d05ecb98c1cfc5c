/* All cells: filters, a hint for each line, a click that opens its cell. */
"use strict";

const report = mmkv.values.report;
const escaped = (text) => String(text ?? "").replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const entries = mmkv.rows(report.entries);
for (const entry of entries) {
  const view = report.views[entry.view];
  Object.assign(entry, { model: view.model, dataset: view.dataset, protocol: view.protocol, metric: view.metric, rows: report.stores[view.store].rows,
    budget_words: budgetWord(view, entry.budget), reading: entry.reading ?? "–" });
}
const FILTERS = { model: "Model", dataset: "Dataset", protocol: "Protocol", reading: "Reading", method: "Method", budget_words: "Budget",
  metric: "Metric", rows: "Rows" };
const ALL = "";
let shown = [];

function filters() {
  for (const [name, words] of Object.entries(FILTERS)) {
    const values = distinct(entries.map((entry) => entry[name]));
    const select = el("select", { id: `filter-${name}`, onchange: apply });
    options(select, [[ALL, `all (${values.length})`], ...values.map((value) => [value, value])], place.get(name) ?? ALL);
    $("filters").append(el("label", { hidden: values.length < 2 }, words, select));
  }
  $("filters").append(el("button", { type: "button", id: "reset", onclick: () => {
    document.querySelectorAll("#filters select").forEach((select) => { select.value = ALL; });
    apply();
  } }, "Show all"));
}

let table = null;
function apply() {
  const wanted = Object.keys(FILTERS).map((name) => [name, $(`filter-${name}`).value]).filter(([, value]) => value !== ALL);
  shown = entries.filter((entry) => wanted.every(([name, value]) => entry[name] === value));
  place.set(Object.fromEntries(Object.keys(FILTERS).map((name) => [name, $(`filter-${name}`).value])));
  $("shown").textContent = `${shown.length} of ${entries.length} lines; a line is a method at a budget, its seeds together.`;
  if (table) table.clear().rows.add(shown).draw();
}

const link = (entry) => (entry.cells.length ? `cell.html#cell=${encodeURIComponent(entry.cells[0])}&metric=${encodeURIComponent(entry.metric)}` : null);
function hintOf(entry) {
  return [el("b", {}, `${entry.method}, ${entry.budget_words}`),
    el("div", {}, `${entry.metric} ${score(entry.value)} ${span(entry.low, entry.high)} (95 %), n = ${entry.n}${entry.n_ok < entry.n ? `, ${entry.n_ok} ok` : ""}`),
    el("div", {}, `Audit: ${entry.audit}.`), el("div", {}, entry.fallbacks ? `Fallbacks: ${entry.fallbacks}.` : "No fallbacks."),
    entry.bytes === null ? null : el("div", {}, `Holds ${bytes(entry.bytes)} (${score(entry.bytes_ratio)} of full).`)].filter(Boolean);
}
function hint(row, entry) {
  const box = row.getBoundingClientRect();
  tell("hint", hintOf(entry));
  $("hint").hidden = false;
  $("hint").style.left = `${Math.max(8, Math.min(box.left + scrollX + 260, scrollX + innerWidth - $("hint").offsetWidth - 12))}px`;
  $("hint").style.top = `${box.bottom + scrollY + 2}px`;
}
const unhint = () => { $("hint").hidden = true; };

const text = (title, data, extra = {}) => ({ title, data, render: (value, kind) => (kind === "display" ? escaped(value) : value), ...extra });
const numeric = (title, data, words = score) => ({ title, data, className: "dt-right", type: "num",
  render: (value, kind, entry) => (kind === "display" ? escaped(words(value, entry)) : value ?? -Infinity) });

async function start() {
  $("about").textContent = report.about;
  filters();
  apply();
  const { default: DataTable } = await import(mmkv.datatables);
  table = new DataTable("#cells", {
    data: shown, deferRender: true, pageLength: 50, lengthMenu: [25, 50, 100, 500], autoWidth: false, order: [],
    columns: [
      { title: "method", data: "method", render: (value, kind, entry) => (kind !== "display" ? value :
        link(entry) ? `<a href="${escaped(link(entry))}">${escaped(value)}</a>` : escaped(value)) },
      { title: "budget", data: "budget", type: "num", render: (value, kind, entry) => (kind === "display" ? escaped(entry.budget_words) : value === "" ? Infinity : +value) },
      numeric("score", "value"), text("95 % interval", "low", { render: (low, kind, entry) => (kind === "display" ? span(low, entry.high) : low ?? -Infinity) }),
      numeric("n", "n", (value, entry) => (entry.n_ok < value ? `${entry.n_ok}/${value}` : String(value))),
      numeric("rank", "rank_low", (value, entry) => rank(value, entry.rank_high)),
      text("dataset", "dataset"), text("metric", "metric"), text("protocol", "protocol"), text("reading", "reading"), text("model", "model"),
      numeric("bytes, of full", "bytes_ratio"), numeric("ms/token", "token_s", (value) => (value === null ? "–" : (1000 * value).toPrecision(3))),
      text("remarks", "fallbacks", { render: (value, kind, entry) => escaped([entry.over ? "over budget" : "", value].filter(Boolean).join("; ")) }),
    ],
    createdRow: (row, entry) => {
      row.addEventListener("mouseenter", () => hint(row, entry));
      row.addEventListener("mouseleave", unhint);
      row.addEventListener("focusin", () => hint(row, entry));
      row.addEventListener("focusout", unhint);
      row.addEventListener("click", (event) => { if (!event.target.closest("a") && link(entry)) location.href = link(entry); });
    },
  });
  document.body.dataset.ready = "table";
}
run(start);
