// Scores, and what they say about preferences.
import { byId, colourOf, formatNumber, formatShare, h, isNumber, nameOf } from "./elements.js";

// P(a is preferred over b) = sigmoid((a - b) / T), Bradley and Terry; of all, softmax(s / T), Plackett and Luce.
const preference = (a, b, temperature) => 1 / (1 + Math.exp((b - a) / temperature));
const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
const lower = (index) => nameOf(index).toLowerCase();
// results/a/final is a: the folder's name, unless it says nothing.
const shortName = (path) => path.replace(/(\/(final|model))+\/?$/, "").split("/").at(-1);
// The places of the numbers, the highest first.
const ranked = (values) => [...values.keys()].filter((i) => isNumber(values[i])).sort((a, b) => values[b] - values[a]);

// `rows`: of /v1/rewards. `model`: of /v1/models. `blank`: whether each completion is empty. Gives the scores in words.
//
// The reward decides which completion is preferred. Probabilities are of scores, which alone are log-odds; where the
// model is served with shaping the two may differ, and both are shown by their names.
export function showScores(rows, model, blank) {
  const word = model?.shaped ? "reward" : "score";
  const scores = rows.map((row) => row.score);
  const values = rows.map((row) => row[word]);
  const about = { rows, model, blank, word, scores, values, order: ranked(values), byScore: ranked(scores), temperature: model?.temperature ?? 1 };
  about.tied = about.order.filter((index) => values[index] === values[about.order[0]]);
  const said = verdict(about);
  byId("cards").replaceChildren(...rows.map((row, index) => card(row, index, about)));
  byId("verdict").textContent = said;
  byId("pairs").replaceChildren(...(about.byScore.length > 1 ? pairs(about) : []));
  const all = values.map((value, i) => `${lower(i)} ${isNumber(value) ? formatNumber(value) : `has no ${word}`}`);
  return `${all.join(", ")}. ${said}`;
}

function card(row, index, { order, byScore, tied, model, blank, word, scores, values, temperature }) {
  const isBest = order.length > 1 && order[0] === index && !blank[index] && tied.length === 1; // no preference in a tie
  const total = byScore.reduce((sum, other) => sum + Math.exp((scores[other] - row.score) / temperature), 0);
  const bar = h("span", { class: "fill" });
  bar.style.setProperty("--part", `${100 / total}%`);
  const list = (name, numbers, names) => numbers?.length && fact(name, h("ul", { class: "values" }, numbers.map((number, i) => h("li", {}, `${names?.[i] ?? i + 1}: `, h("b", {}, formatNumber(number))))));
  return h("li", { class: `card ${colourOf(index)}${isBest ? " best" : ""}` },
    h("h3", {}, nameOf(index), isBest && h("span", { class: "badge" }, "preferred")),
    row.error && h("p", { class: "trouble" }, `No ${isNumber(row.score) ? "reward" : "score"}: ${row.error}`),
    isNumber(values[index]) && [h("p", { class: "what" }, model?.shaped ? "reward, shaped" : "score"), h("p", { class: "score" }, formatNumber(values[index]))],
    isNumber(row.score) && byScore.length > 1 && h("div", { class: "portion" },
      h("span", { class: "track", "aria-hidden": "true" }, bar),
      h("span", {}, `${formatShare(1 / total)} to be the best of ${byScore.length}${model?.shaped ? ", by score" : ""}`)),
    h("dl", {},
      word === "reward" && isNumber(row.score) && fact("score", formatNumber(row.score)),
      fact("tokens", `${row.num_tokens}${model?.max_model_len ? ` of ${model.max_model_len}` : ""}`),
      blank[index] && fact("text", "none, the completion is empty"),
      row.truncated && fact("context", "cut at its beginning, as it is too long"),
      list("heads", row.heads, model?.heads),
      list("members", row.members, model?.members?.map(shortName))));
}

function verdict({ order, byScore, tied, blank, word, scores, temperature }) {
  const [first, second] = order;
  if (order.length < 2) return order.length ? `One ${word} alone says little: compare completions of one conversation.` : "";
  if (tied.length > 1) return `${tied.map(nameOf).join(" and ")} have the same ${word}: none is preferred.`;
  const chance = (a, b) => formatShare(preference(scores[a], scores[b], temperature));
  const opening = `${nameOf(first)} is preferred${word === "reward" ? ", as its reward is the highest" : ""}${blank[first] ? ", though it is empty" : ""}`;
  if (scores[byScore[0]] > scores[first]) return `${opening}; by score ${lower(byScore[0])} would be preferred over it, with a probability of ${chance(byScore[0], first)}.`;
  return `${opening}; ${word === "reward" ? "by score it is preferred " : ""}over ${lower(second)} with a probability of ${chance(first, second)}.`;
}

function pairs({ byScore, scores, temperature }) {
  const known = [...byScore].sort((a, b) => a - b);
  const cell = (a, b) => {
    if (a === b) return h("td", {});
    const chance = preference(scores[a], scores[b], temperature);
    const td = h("td", { class: "cell" }, formatShare(chance));
    td.style.setProperty("--share", `${Math.round(65 * chance)}%`);
    return td;
  };
  const divided = temperature === 1 ? "" : `, divided by the model's fitted temperature of ${formatNumber(temperature)}`;
  return [
    h("p", { class: "note", id: "pairs-note" }, `Probability that the completion of the row is preferred over that of the column: sigmoid of the difference of their scores${divided}.`),
    h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Probabilities of preference" },
      h("table", { class: "matrix", "aria-describedby": "pairs-note" },
        h("thead", {}, h("tr", {}, h("td", {}), known.map((b) => h("th", { scope: "col" }, nameOf(b))))),
        h("tbody", {}, known.map((a) => h("tr", {}, h("th", { scope: "row" }, nameOf(a)), known.map((b) => cell(a, b))))))),
  ];
}
