// Scores, and what they say about preferences.
import { byId, clamp, colourOf, formatNumber, formatShare, h, isNumber, nameOf, namesOf, plural } from "./elements.js";

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
//
// What the server returns as the reward decides which answer is preferred. Probabilities are of scores, which alone are
// log-odds; where the model is served with shaping the two may differ, and both are shown by their names.
export function showScores(rows, model, blank) {
  const about = { rows, model, blank, temperature: model?.temperature ?? 1, isShaped: Boolean(model?.shaped) };
  const scores = rows.map((row) => row.score);
  about.byScore = ranked(scores);
  about.order = about.isShaped ? ranked(rows.map((row) => row.reward)) : about.byScore;
  const portions = shares(scores, about.temperature);
  byId("cards").replaceChildren(...rows.map((row, index) => card(row, index, portions[index], about)));
  byId("verdict").textContent = verdict(about);
  byId("pairs").replaceChildren(...(about.byScore.length > 1 ? pairs(scores, about) : []));
  return spoken(about);
}

// The places of the numbers, the highest first.
const ranked = (values) => values.map((_, index) => index).filter((index) => isNumber(values[index])).sort((a, b) => values[b] - values[a]);
const valueOf = ({ rows, isShaped }, index) => (isShaped ? rows[index].reward : rows[index].score);
const tied = (about) => about.order.filter((index) => valueOf(about, index) === valueOf(about, about.order[0]));

function card(row, index, share, about) {
  const { order, byScore, model, blank, isShaped } = about;
  const best = order[0] === index && order.length > 1 && !blank[index] && tied(about).length === 1; // nothing is preferred in a tie
  const bar = h("span", { class: "fill" });
  bar.style.setProperty("--part", `${100 * clamp(share ?? 0, 0, 1)}%`);
  const values = (name, list, names) => list?.length > 0 && fact(name, h("ul", { class: "values" }, list.map((value, i) => h("li", {}, `${names?.[i] ?? i + 1}: `, h("b", {}, formatNumber(value))))));
  return h("li", { class: `card ${colourOf(index)}${best ? " best" : ""}` },
    h("h3", {}, nameOf(index), best && h("span", { class: "badge" }, "preferred")),
    row.error !== null && row.error !== undefined && h("p", { class: "trouble" }, `${isNumber(row.score) ? "No reward" : "No score"}: ${row.error}`),
    isNumber(valueOf(about, index)) && [h("p", { class: "what" }, isShaped ? "reward, shaped" : "score"), h("p", { class: "score" }, formatNumber(valueOf(about, index)))],
    isNumber(share) && byScore.length > 1 && h("div", { class: "portion" },
      h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", {}, `${formatShare(share)} to be the best of ${byScore.length}${isShaped ? ", by score" : ""}`)),
    h("dl", {},
      isShaped && isNumber(row.score) && fact("score", formatNumber(row.score)),
      fact("tokens", `${row.num_tokens.toLocaleString("en-US")}${model?.max_model_len ? ` of ${model.max_model_len.toLocaleString("en-US")}` : ""}`),
      blank[index] && fact("text", "none, the answer is empty"),
      row.truncated && fact("context", "cut at its beginning, as it is too long"),
      values("heads", row.heads, model?.heads),
      values("members", row.members, model?.members?.map(shortName))));
}

// results/a/final is a: the folder's name, unless it says nothing.
const shortName = (path) => path.replace(/(\/(final|model))+\/?$/, "").split("/").at(-1);

const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

function verdict(about) {
  const { rows, order, byScore, temperature, blank, isShaped } = about;
  const value = isShaped ? "reward" : "score";
  if (order.length < 2) return order.length ? `One ${value} alone says little: ${value}s of answers to one conversation are to be compared.` : "";
  const best = tied(about);
  if (best.length > 1) return `${namesOf(best)} have the same ${value}${order.length > best.length ? ", the highest" : ""}: none is preferred.`;
  const [first, second] = order;
  const chance = (a, b) => formatShare(preference(rows[a].score, rows[b].score, temperature));
  const opening = `${nameOf(first)} is preferred${isShaped ? ", as its reward is the highest" : ""}${blank[first] ? ", though it is empty" : ""}`;
  if (!isShaped) return `${opening}; over ${lower(second)} with a probability of ${chance(first, second)}.`;
  if (rows[byScore[0]].score === rows[first].score) return `${opening}; by score it is preferred over ${lower(second)} with a probability of ${chance(first, second)}.`;
  return `${opening}; by score ${lower(byScore[0])} would be preferred over it, with a probability of ${chance(byScore[0], first)}.`;
}

const lower = (index) => nameOf(index).toLowerCase();

function pairs(scores, { byScore, temperature, isShaped }) {
  const known = [...byScore].sort((a, b) => a - b);
  const cell = (a, b) => {
    if (a === b) return h("td", { class: "cell none" }, h("span", { class: "visually-hidden" }, "the same"));
    const chance = preference(scores[a], scores[b], temperature);
    const td = h("td", { class: "cell" }, formatShare(chance));
    td.style.setProperty("--share", `${Math.round(65 * chance)}%`);
    return td;
  };
  const how = temperature === 1 ? "sigmoid of the difference of their scores" : `sigmoid of the difference of their scores, divided by the model's fitted temperature of ${formatNumber(temperature)}`;
  return [
    h("p", { class: "note", id: "pairs-note" }, `Probability that the answer of the row is preferred over that of the column: ${how}${isShaped ? "; rewards are shaped, these are of scores" : ""}.`),
    h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Probabilities of preference" },
      h("table", { class: "matrix", "aria-describedby": "pairs-note" },
        h("caption", { class: "visually-hidden" }, "Probabilities of preference"),
        h("thead", {}, h("tr", {}, h("td"), known.map((b) => h("th", { scope: "col" }, nameOf(b))))),
        h("tbody", {}, known.map((a) => h("tr", {}, h("th", { scope: "row" }, nameOf(a)), known.map((b) => cell(a, b))))))),
  ];
}

function spoken(about) {
  const { rows, order, isShaped } = about;
  const value = isShaped ? "reward" : "score";
  const failed = rows.length - order.length;
  const all = rows.map((_, index) => `${lower(index)} ${isNumber(valueOf(about, index)) ? formatNumber(valueOf(about, index)) : `has no ${value}`}`);
  return `${plural(order.length, value)}${failed ? `, ${failed} failed` : ""}: ${all.join(", ")}. ${order.length > 1 ? verdict(about) : ""}`;
}
