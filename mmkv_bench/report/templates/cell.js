/* One cell: scores, audit, the command, where it comes from. */
"use strict";

let cell = null;

function heads() {
  const which = +$("which").value;
  if (!cell.kept) {
    $("which-label").hidden = true;
    tell("heads", el("p", { class: "quiet" }, "These rows do not tell entries by layer and head, or their shapes differ between answers."));
    return;
  }
  const values = cell.kept[which], layers = values.length, width = values[0].length;
  const table = () => plainTable(["layer", ...values[0].map((_, head) => `head ${head}`)], values.map((row, layer) => [String(layer), ...row]));
  chart("heads", [{ type: "heatmap", z: values, zmin: 0, colorscale: SCALE, xgap: 1, ygap: 1, hovertemplate: "layer %{y}, KV head %{x}: %{z:.1f} entries<extra></extra>",
    colorbar: { title: { text: "entries" } }, text: layers * width <= 400 ? values.map((row) => row.map((value) => value.toFixed(value >= 100 ? 0 : 1))) : undefined,
    texttemplate: layers * width <= 400 ? "%{text}" : undefined }],
  { height: Math.min(900, 120 + 26 * layers), xaxis: { title: { text: "KV head" }, dtick: width > 20 ? 4 : 1, showgrid: false },
    yaxis: { title: { text: "layer" }, autorange: "reversed", dtick: layers > 40 ? 4 : 1, showgrid: false } }, table);
}

const ends = (values) => (!values ? "not told" : values[0] === values[2] ? `${values[0]}` : `${values[0]} to ${values[2]}, ${score(values[1])} on average`);

function audit() {
  const told = cell.counted;
  if (!told) return "No answers of this cell are stored.";
  const ended = Object.entries(told.ended).map(([status, n]) => `${n} ${status}`).join(", ");
  return `${told.answers} answers (${ended}). Entries asked over all layers and KV heads: ${ends(told.entries_asked)}; counted in the stored tensors: ${ends(told.entries_resident)}; ` +
    `${told.over} over what was asked. Tokens per answer: ${ends(told.n_tokens)}; of these from the compressed cache: ${ends(told.tokens_from_compressed)}.`;
}

async function start() {
  const name = place.get("cell");
  if (!name || !/^[A-Za-z0-9_-]+$/.test(name)) throw new Error("No cell is named: open one from the table.");
  cell = await mmkv.load(`cells/${name}`);
  const row = cell.row;
  document.title = `${cell.label} · mmkv_bench report`;
  $("title").textContent = cell.label;
  $("where").textContent = `Cell ${cell.hash} of ${mmkv.values.report.stores[cell.store].rows}: ${row.dataset}, model ${row.model}, protocol ${row.protocol}.`;
  const links = [el("a", { href: `table.html#dataset=${encodeURIComponent(row.dataset)}&protocol=${encodeURIComponent(row.protocol)}` }, "all cells of this dataset")];
  if (cell.answers) links.unshift(el("a", { id: "to-samples", href: `samples.html#cell=${name}` }, `its samples (${cell.answers.status.length})`), " · ");
  for (const seed of cell.seeds) links.push(" · ", el("a", { href: `cell.html#cell=${seed.name}` }, `seed ${seed.seed}`));
  tell("links", links);
  tell("scores", cell.scores.length ? plainTable(["metric", "score", "95 % interval", "n", "ok", "minus full", "95 % interval", "lmms-eval's"], cell.scores.map((s) =>
    [s.metric, s.value, span(s.low, s.high), String(s.n), String(s.n_ok), s.difference, span(s.difference_low, s.difference_high), s.lmms_eval ?? s.lmms_eval_reason])) :
    el("p", { class: "quiet" }, "Not scored yet."));
  $("audit").textContent = audit();
  $("which").addEventListener("change", heads);
  heads();
  $("command").textContent = cell.command.line;
  $("command-note").textContent = cell.command.note;
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(cell.command.line);
    } catch {  // pages of files may not use the clipboard everywhere
      getSelection().selectAllChildren($("command"));
      document.execCommand("copy");
    }
    $("copied").textContent = "copied";
  });
  tell("row", plainTable(["column", "value"], Object.entries({ cell: cell.hash, ...row }).map(([key, value]) => [key, String(value)])));
  $("config").textContent = JSON.stringify(await mmkv.load(cell.config), null, 1);
  document.body.dataset.ready = "cell";
}
run(start);
