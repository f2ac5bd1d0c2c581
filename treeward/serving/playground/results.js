// Scores, and what they say about preferences.
import { byId, clamp, colourOf, formatNumber, formatShare, h, isNumber, nameOf, plural } from "./elements.js";

const sigmoid = (x) => (x >= 0 ? 1 / (1 + Math.exp(-x)) : Math.exp(x) / (1 + Math.exp(x)));

// P(a is preferred over b) = sigmoid((a - b) / T), Bradley and Terry; of all, softmax(s / T), Plackett and Luce.
export const preference = (a, b, temperature = 1) => sigmoid((a - b) / temperature);

export function shares(scores, temperature = 1) {
  const known = scores.filter(isNumber);
  const top = Math.max(...known);
  const weights = scores.map((score) => (isNumber(score) ? Math.exp((score - top) / temperature) : null));
  const sum = weights.reduce((total, weight) => total + (weight ?? 0), 0);
  return weights.map((weight) => (weight === null ? null : weight / sum));
}

// `rows`: of /v1/rewards. `model`: of /v1/models. `blank`: whether each answer is empty.
export function showScores(rows, model, blank) {
  const scores = rows.map((row) => row.score);
  const temperature = model?.temperature ?? 1;
  const portions = shares(scores, temperature);
  const order = scores.map((score, index) => index).filter((index) => isNumber(scores[index])).sort((a, b) => scores[b] - scores[a]);
  byId("cards").replaceChildren(...rows.map((row, index) => card(row, index, portions[index], { order, scores, model, isBlank: blank[index] })));
  byId("verdict").textContent = verdict(scores, order, temperature, { model, blank });
  byId("pairs").replaceChildren(...(order.length > 1 ? [pairs(scores, temperature, model)] : []));
  return spoken(rows, scores, order, temperature, { model, blank });
}

function card(row, index, share, { order, scores, model, isBlank }) {
  const place = order.indexOf(index);
  const best = place === 0 && order.length > 1 && !isBlank && scores[order[1]] !== row.score; // nothing is preferred in a tie
  const bar = h("span", { class: "fill" });
  bar.style.setProperty("--part", `${100 * clamp(share ?? 0, 0, 1)}%`);
  const number = (value) => formatNumber(value);
  const values = (name, list, names) => list?.length > 0 && fact(name, h("ul", { class: "values" }, list.map((value, i) => h("li", {}, `${names?.[i] ?? i + 1}: `, h("b", {}, number(value))))));
  return h("li", { class: `card ${colourOf(index)}${best ? " best" : ""}` },
    h("h3", {}, nameOf(index), best && h("span", { class: "badge" }, model?.shaped ? "preferred by score" : "preferred")),
    row.error !== null && row.error !== undefined && h("p", { class: "trouble" }, `${isNumber(row.score) ? "No reward" : "No score"}: ${row.error}`),
    isNumber(row.score) && [
      h("p", { class: "score" }, number(row.score)),
      order.length > 1 && h("div", { class: "portion" }, h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", {}, `${formatShare(share)} to be the best of ${order.length}`)),
    ],
    h("dl", {},
      model?.shaped && isNumber(row.reward) && fact("reward, shaped", number(row.reward)),
      fact("tokens", `${row.num_tokens.toLocaleString("en-US")}${model?.max_model_len ? ` of ${model.max_model_len.toLocaleString("en-US")}` : ""}`),
      isBlank && fact("text", "none, the answer is empty"),
      row.truncated && fact("context", "cut at its beginning, as it is too long"),
      values("heads", row.heads, model?.heads),
      values("members", row.members, model?.members?.map(shortName))));
}

// results/a/final is a: the folder's name, unless it says nothing.
const shortName = (path) => path.replace(/(\/(final|model))+\/?$/, "").split("/").at(-1);

const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

function verdict(scores, order, temperature, { model, blank }) {
  if (order.length < 2) return order.length ? "One score alone says little: scores of answers to one conversation are to be compared." : "";
  const [first, second] = order;
  if (scores[first] === scores[second]) return `${nameOf(first)} and ${nameOf(second).toLowerCase()} have the same score.`;
  const chance = formatShare(preference(scores[first], scores[second], temperature));
  const how = `${model?.shaped ? " by score" : ""}${blank[first] ? ", though it is empty" : ""}`;
  return `${nameOf(first)} is preferred${how}; over ${nameOf(second).toLowerCase()} with a probability of ${chance}.`;
}

function pairs(scores, temperature, model) {
  const known = scores.map((_, index) => index).filter((index) => isNumber(scores[index]));
  const cell = (a, b) => {
    if (a === b) return h("td", { class: "cell none" }, h("span", { class: "visually-hidden" }, "the same"));
    const chance = preference(scores[a], scores[b], temperature);
    const td = h("td", { class: "cell" }, formatShare(chance));
    td.style.setProperty("--share", `${Math.round(65 * chance)}%`);
    return td;
  };
  const how = temperature === 1 ? "sigmoid of the difference of their scores" : `sigmoid of the difference of their scores, divided by the model's fitted temperature of ${formatNumber(temperature)}`;
  return h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Probabilities of preference" },
    h("p", { class: "note", id: "pairs-note" }, `Probability that the answer of the row is preferred over that of the column: ${how}${model?.shaped ? "; rewards are shaped, these are of scores" : ""}.`),
    h("table", { class: "matrix", "aria-describedby": "pairs-note" },
      h("caption", { class: "visually-hidden" }, "Probabilities of preference"),
      h("thead", {}, h("tr", {}, h("td"), known.map((b) => h("th", { scope: "col" }, nameOf(b))))),
      h("tbody", {}, known.map((a) => h("tr", {}, h("th", { scope: "row" }, nameOf(a)), known.map((b) => cell(a, b)))))));
}

function spoken(rows, scores, order, temperature, about) {
  const failed = rows.length - order.length;
  const listed = scores.map((score, index) => (isNumber(score) ? `${nameOf(index).toLowerCase()} ${formatNumber(score)}` : `${nameOf(index).toLowerCase()} has no score`));
  return `${plural(order.length, "score")}${failed ? `, ${failed} failed` : ""}: ${listed.join(", ")}. ${order.length > 1 ? verdict(scores, order, temperature, about) : ""}`;
}
