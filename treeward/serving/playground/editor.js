// The fields in which a conversation and its answers are written. The state is read from and kept in `state`.
import { ROLES, answerOf } from "./conversation.js";
import { byId, colourOf, h, nameOf } from "./elements.js";

export class Editor {
  // onchange() is called after each change of the text.
  constructor(state, onchange) {
    this.state = state;
    this.onchange = onchange;
    byId("add-turn").addEventListener("click", () => this.addTurn());
    byId("add-answer").addEventListener("click", () => this.addAnswer());
    this.draw();
  }

  load(state) {
    Object.assign(this.state, state);
    this.draw();
    this.onchange();
  }

  draw() {
    this.drawTurns();
    this.drawAnswers();
  }

  addTurn() {
    const { context } = this.state;
    context.push({ role: context.at(-1)?.role === "user" ? "assistant" : "user", content: "" });
    this.drawTurns();
    byId("context").lastElementChild.querySelector("textarea").focus();
    this.onchange();
  }

  addAnswer() {
    this.state.answers.push(answerOf(""));
    this.drawAnswers();
    byId("answers").lastElementChild.querySelector("textarea").focus();
    this.onchange();
  }

  drawTurns() {
    byId("context").replaceChildren(...this.state.context.map((message, index) => this.turn(message, index)));
  }

  drawAnswers() {
    byId("answers").replaceChildren(...this.state.answers.map((message, index) => this.answer(message, index)));
  }

  turn(message, index) {
    const roles = ROLES.includes(message.role) ? ROLES : [...ROLES, message.role];
    const role = h("select", { "aria-label": `Role of turn ${index + 1}`, onchange: () => this.change(message, "role", role.value) },
      roles.map((name) => h("option", { value: name, selected: name === message.role }, name)));
    return h("li", { class: "turn" },
      h("div", { class: "turn-head" }, role, this.extras(message), this.remover("context", index, `Remove turn ${index + 1}`)),
      this.text(message, `Text of turn ${index + 1}`, 2));
  }

  answer(message, index) {
    return h("li", { class: `answer ${colourOf(index)}` },
      h("div", { class: "turn-head" }, h("h3", {}, nameOf(index)), this.extras(message), this.remover("answers", index, `Remove answer ${index + 1}`)),
      this.text(message, `Text of answer ${index + 1}`, 4));
  }

  text(message, label, rows) {
    const area = h("textarea", { "aria-label": label, rows, dir: "auto", oninput: () => this.change(message, "content", area.value) });
    area.value = message.content;
    return area;
  }

  // What a pasted message has beside its text goes to the chat template as it came.
  extras(message) {
    const names = Object.keys(message).filter((key) => key !== "role" && key !== "content");
    return names.length ? h("span", { class: "faint extras" }, `with ${names.join(", ")}`) : null;
  }

  remover(list, index, label) {
    return h("button", { type: "button", class: "remove", "aria-label": label, title: label, onclick: () => this.remove(list, index) }, "\u00d7");
  }

  remove(list, index) {
    this.state[list].splice(index, 1);
    this.draw();
    const left = byId(list).querySelectorAll("textarea");
    // Who removes with the keyboard goes on at the place where they were.
    (left[Math.min(index, left.length - 1)] || byId(list === "context" ? "add-turn" : "add-answer")).focus();
    this.onchange();
  }

  change(message, key, value) {
    message[key] = value;
    this.onchange();
  }
}
