/* Answers of cells to samples, as both pages of samples show them. */
"use strict";

/** An answer with what follows its first difference from the full cache's marked; a failed one says how it ended. */
function answerNode(answer, status, full, error = null) {
  if (status === null || status === undefined) return el("span", { class: "quiet" }, "no row");
  if (status !== "ok") return el("span", { class: "bad", title: error }, status);
  if (full === null || full === undefined || answer === full) return el("span", { class: "answer" }, answer);
  let same = 0;
  while (same < answer.length && same < full.length && answer[same] === full[same]) same++;
  return el("span", { class: "answer" }, answer.slice(0, same), el("mark", { title: `leaves full's answer: ${full}` }, answer.slice(same) || "∅"));
}

function valueNode(value) {
  if (value === null || value === undefined) return el("span", { class: "quiet" }, "–");
  const word = value === 1 ? "✓ " : value === 0 ? "✗ " : "";
  return el("span", { class: value === 1 ? "good" : value === 0 ? "bad" : null }, word + score(value));
}

const token = (place) => (place === null || place === undefined ? "" : place < 0 ? "never" : `token ${place + 1}`);

function pictures(prompt, high) {
  return prompt.images.map((path, k) => el("img", { src: path, alt: `image ${k + 1} of ${prompt.images.length}`, loading: "lazy", height: high,
    onerror: (event) => event.target.replaceWith(el("span", { class: "quiet" }, `${path} is gone`)) }));
}

const cellWords = (cell) => `${cell.label}${cell.budget ? `, ${cell.budget}` : ""}${cell.seed === null ? "" : `, seed ${cell.seed}`}`;

async function groupOf(name) {
  if (!name || !/^[A-Za-z0-9_-]+$/.test(name)) throw new Error("No samples are named: open them from a cell.");
  return mmkv.load(`groups/${name}`);
}
