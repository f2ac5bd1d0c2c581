// Answers to one prompt side by side, a row of them for each who gave them.
"use strict";

const LONG_ANSWER = 900;

function samplesList(block) {
  const items = block.items.map((item, index) => {
    const summary = h("summary", { dir: "auto" }, excerpt(promptOf({ context: item.prompt }), 160) || "(no prompt)");
    const folded = h("details", { class: "sample" }, summary);
    const make = () => {
      if (folded.children.length === 1) folded.append(sampleBody(item));
    };
    folded.addEventListener("toggle", () => { if (folded.open) make(); });
    if (index === 0) {
      folded.open = true;
      make();
    }
    return { folded, make };
  });
  let opened = [];
  printing.push((on) => {
    for (const { make } of on ? items : []) make();
    const closed = items.flatMap(({ folded }) => [folded, ...folded.querySelectorAll("details")]).filter((one) => !one.open);
    for (const one of on ? closed : opened) one.open = on;
    opened = on ? closed : [];
  });
  return h("div", { class: "samples" }, items.map(({ folded }) => folded));
}

function sampleBody(item) {
  return h("div", { class: "example" },
    h("div", { class: "question" }, messageList(messagesOf(item.prompt), null)),
    item.rows.map((row, index) => [
      row.name && h("h4", { class: "sample-of", dir: "auto" }, swatch(row.colour ?? index), " ", row.name),
      h("div", { class: "answers" }, row.answers.map((answer) => h("article", { class: "answer", "aria-label": [row.name, answer.label].filter(Boolean).join(", ") },
        h("p", { class: "answer-label" }, h("strong", null, answer.label), (answer.flags || []).map((flag) => h("span", { class: "preferred" }, flag))),
        h("p", { class: "facts" }, (answer.numbers || []).map(({ label, value, format }, at) =>
          [at > 0 && " · ", `${label} `, h("strong", null, formatNumber(value, format))])),
        answer.text.trim() ? h("div", { class: "words", dir: "auto" }, cellText(answer.text, LONG_ANSWER)) : h("p", { class: "faint" }, "(no text)")))),
    ]));
}
