"""The page at / for those who use it with a keyboard, a screen reader, a phone, or colours of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import chromium
from playground import ANSWERS, QUESTION, Visits, answered, expect, score, serving, settled, visiting, write

from treeward.serving.models import ServedModel

LONG = "The yolk stays soft, and the white is firm. " * 460
FOCUSED = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"


@pytest.fixture(scope="module")
def url(loaded_model: ServedModel) -> Iterator[str]:
    with serving([loaded_model]) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Visits]:
    with visiting(browser, url) as visits:
        yield visits


def test_everything_is_reached_and_done_by_the_keyboard(visit: Visits) -> None:
    page = visit()
    reached: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
        if reached[-1] == "download":
            break
        # what has the focus shows it
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached[-1]
    assert [name for name in reached if name] == [
        "model", "theme", "paste", "clear", "Role of turn 1", "Remove turn 1", "Text of turn 1", "add-turn",
        "Remove answer 1", "Text of answer 1", "Remove answer 2", "Text of answer 2", "add-answer", "score",
        "with-trace", "copy-link", "copy-json", "download",
    ]  # fmt: skip
    write(page, ANSWERS[:2])
    page.get_by_label("Text of answer 2").focus()
    page.keyboard.press("Control+Enter")
    settled(page)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Text of answer 2"
    page.locator(".plot").focus()
    page.keyboard.press("Home")
    said = page.locator(".plot").get_attribute("aria-valuetext")
    assert said.startswith("token 1: Answer 1 ") and "Answer 2" in said
    page.keyboard.press("ArrowRight")
    assert page.locator(".plot").get_attribute("aria-valuenow") == "2"
    page.keyboard.press("End")
    assert page.locator(".plot").get_attribute("aria-valuenow") == page.locator(".plot").get_attribute("aria-valuemax")
    page.get_by_role("button", name="Remove answer 1").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Text of answer 1"
    expect(page.get_by_label("Text of answer 1")).to_have_value(ANSWERS[1])
    page.get_by_role("button", name="Add a turn").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Text of turn 2"
    expect(page.get_by_label("Role of turn 2")).to_have_value("assistant")


def test_every_control_has_a_name_and_ids_are_unique(visit: Visits) -> None:
    page = visit()
    write(page)
    score(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=slider], [role=region]")]
            .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.documentElement.lang") == "en"
    live = page.evaluate("[...document.querySelectorAll('[role=status], [role=alert]')].map((one) => one.id)")
    assert live == ["trouble", "status", "trace-status", "paste-trouble"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_legible(visit: Visits, scheme: str) -> None:
    page = visit(color_scheme=scheme)
    write(page)
    score(page)
    faint = page.evaluate(CONTRAST)
    assert faint == []
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme").click()
    assert page.get_by_role("button", name="Theme").inner_text() == "Theme: dark"
    changed = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (changed == light) == (scheme == "dark")


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    return parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  };
  const light = (rgb) => 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
  const faint = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.checkVisibility() || one.closest("svg")) continue;
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const [back, text] = [light(over(layers)), light(over([...layers, getComputedStyle(one).color]))];
    const ratio = (Math.max(back, text) + 0.05) / (Math.min(back, text) + 0.05);
    if (ratio < 4.5) faint.push([one.className || one.tagName, one.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return faint;
}"""


@pytest.mark.parametrize("width", [640, 400, 320])  # 640: of a window of 1280, at 200 %
def test_a_phone_shows_all_of_it(visit: Visits, width: int) -> None:
    page = visit(width=width, height=800, has_touch=True)
    write(page, [ANSWERS[0], "a" * 120, ANSWERS[2]])
    score(page)
    expect(page.locator("#chart path.line")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, select")].map((one) => [one.id, one.getBoundingClientRect()])
            .filter(([, box]) => box.width && (box.width < 32 || box.height < 32)).map(([id]) => id)"""
    )
    assert small == []
    page.set_viewport_size({"width": 900, "height": 800})
    expect(page.locator(".plot svg")).to_have_attribute("width", re.compile("[78]\\d\\d"))


@pytest.fixture(scope="module")
def audit() -> Any:
    """A function that asks axe-core what is wrong with a page as it is."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the dev extra has it").Axe()
    options = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}

    def wrong(page: Any) -> list[Any]:
        found = axe.run(page, options=options).response["violations"]
        return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]

    return wrong


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 320)])
def test_axe_finds_nothing_wrong(visit: Visits, audit: Any, scheme: str, width: int) -> None:
    page = visit(color_scheme=scheme, width=width)
    found = {"empty": audit(page)}
    page.get_by_role("button", name="Score").click()
    expect(page.locator("#trouble")).not_to_have_text("")
    found["error"] = audit(page)
    write(page, [*ANSWERS, "", "egg " * 300, "egg\n" * 20])  # one is empty, one too long, one is scrolled
    score(page)
    expect(page.locator("#chart path.line")).to_have_count(4)
    found["scored"] = audit(page)
    page.locator("#numbers summary").click()
    page.locator(".plot").focus()
    page.keyboard.press("Home")
    expect(page.locator("#tip")).to_be_visible()
    found["trace"] = audit(page)
    page.get_by_label("Text of turn 1").fill("Another question")
    expect(page.locator("#stale")).to_be_visible()
    found["stale"] = audit(page)
    page.get_by_role("button", name="Paste JSON or a transcript").click()
    page.locator("#paste-text").fill("{")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#paste-trouble")).not_to_have_text("")
    found["paste"] = audit(page)
    assert {state: wrong for state, wrong in found.items() if wrong} == {}


def test_axe_finds_nothing_wrong_with_shaping_nor_with_the_token(visit: Visits, audit: Any) -> None:
    page = visit()
    answered(page, [{"score": 1.2, "reward": -1.0, "heads": [1, 2]}, {"score": 0.4, "reward": 0.3}], shaped=True)
    write(page, ANSWERS[:2])
    score(page)
    assert audit(page) == []
    page.route("**/v1/rewards", lambda route: route.fulfill(status=401, json={"error": {"message": "no token"}}))
    page.get_by_role("button", name="Score").click()
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    assert audit(page) == []
    assert len(visit.said) == 1 and "401" in visit.said.pop()


def test_what_happens_is_announced(visit: Visits) -> None:
    page = visit()
    page.evaluate(
        """() => {
          window.heard = [];
          for (const one of document.querySelectorAll("[role=status], [role=alert]")) {
            // what is not displayed is in no screen reader's tree, and what is said there may be lost
            const isThere = one.checkVisibility() || one.closest("[hidden], dialog");
            if (!isThere) heard.push(`${one.id} is away`);
            const listen = () => one.textContent && heard.push(one.textContent);
            new MutationObserver(listen).observe(one, { childList: true });
          }
        }"""
    )
    page.get_by_role("button", name="Score").click()
    write(page, ANSWERS[:2])
    score(page)
    expect(page.locator("#chart path.line")).to_have_count(2)
    said = page.locator("#status").inner_text()
    assert re.fullmatch(
        r"2 scores: answer 1 \S+, answer 2 \S+\. Answer \d is preferred; over answer \d with .*%\.", said
    )
    heard = ["The answers are empty: write at least one.", "Scoring.", said, "Scoring the beginnings of the answers."]
    assert page.evaluate("window.heard") == heard


def test_the_scores_read_in_order(visit: Visits) -> None:
    page = visit()
    answered(page, [{"score": 1.2, "reward": 1.2}, {"score": 0.4, "reward": 0.4}])
    write(page, ANSWERS[:2])
    score(page)
    expect(page.locator("#results")).to_match_aria_snapshot(
        """
        - region "Scores":
          - heading "Scores" [level=2]
          - paragraph: Answer 1 is preferred; over answer 2 with a probability of 69.0%.
          - list:
            - listitem:
              - heading "Answer 1 preferred" [level=3]
              - paragraph: score
              - paragraph: "1.200"
              - text: 69.0% to be the best of 2
              - term: tokens
              - definition: 9 of 160
            - listitem:
              - heading "Answer 2" [level=3]
              - paragraph: score
              - paragraph: "0.400"
          - region "Probabilities of preference":
            - table "Probabilities of preference":
              - rowgroup:
                - row "Answer 1 Answer 2"
              - rowgroup:
                - row "Answer 1 the same 69.0%"
                - row "Answer 2 31.0% the same"
        """
    )


def test_a_keyboard_alone_is_enough(visit: Visits) -> None:
    page = visit()
    press, write_text = page.keyboard.press, page.keyboard.type

    def go_to(name: str, key: str = "Tab") -> None:
        for _ in range(40):
            press(key)
            if page.evaluate(FOCUSED) == name:
                return
        raise AssertionError(f"{name} is not reached with {key}")

    go_to("Text of turn 1")
    write_text(QUESTION)
    go_to("Text of answer 1")
    write_text(ANSWERS[0])
    go_to("Text of answer 2")
    write_text(ANSWERS[1])
    go_to("add-answer")
    press("Enter")
    assert page.evaluate(FOCUSED) == "Text of answer 3"
    write_text(LONG[:100])
    go_to("score")
    press("Enter")
    settled(page)
    expect(page.locator("#chart path.line")).to_have_count(3)
    go_to("Probabilities of preference")
    go_to("The score over the tokens of each answer; arrow keys go from token to token")
    press("Home")
    expect(page.locator("#tip")).to_contain_text("token 1")
    press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    press("Tab")
    press("Space")
    expect(page.locator("#tables table").first).to_be_visible()
    go_to("Answer 1: the score over the tokens")
    go_to("Remove answer 3", "Shift+Tab")
    press("Enter")
    assert page.evaluate(FOCUSED) == "Text of answer 2", "the last that is left"
    go_to("paste", "Shift+Tab")
    press("Enter")
    assert page.evaluate(FOCUSED) == "paste-text"
    press("Escape")
    assert page.evaluate(FOCUSED) == "paste"
    press("Enter")
    write_text("User: 2 + 2?")
    press("Tab")
    press("Enter")
    assert page.evaluate(FOCUSED) == "score"
    expect(page.get_by_label("Text of turn 1")).to_have_value("2 + 2?")


def test_an_error_is_seen_where_the_reader_is(visit: Visits) -> None:
    page = visit(width=400, height=400)
    write(page, ["", "", ""], "")
    page.get_by_label("Text of turn 1").focus()
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#trouble")).to_be_in_viewport()


def test_a_long_text_is_scrolled_in_its_box_and_follows_the_chart(visit: Visits) -> None:
    page = visit(reduced_motion="reduce")
    words = [LONG[i : i + 5] for i in range(0, len(LONG), 5)]
    assert len(LONG) > 20_000
    points = [{"tokens": n, "score": n / len(words)} for n in range(1, len(words) + 1, 40)]
    traced = {"text": LONG, "end": "", "tokens": [{"text": word} for word in words], "points": points}
    answered(page, [{"score": 1.0, "reward": 1.0}, {"score": 0.5, "reward": 0.5}])
    page.route("**/v1/rewards/trace", lambda route: route.fulfill(json=traced))
    page.get_by_role("checkbox", name="over the tokens too").check()
    write(page, [LONG, LONG])
    score(page)
    texts = page.get_by_role("region", name="Text of answer 1, shaded")
    expect(texts).to_have_attribute("tabindex", "0")
    assert texts.bounding_box()["height"] < 500
    page.locator(".plot").focus()
    page.keyboard.press("End")
    top = page.evaluate("scrollY")
    expect(texts.locator(".current")).to_be_in_viewport(ratio=0.01)
    assert texts.evaluate("(box) => box.scrollTop > 500") and page.evaluate("scrollY") == top
    texts.locator(".shade").last.hover()
    tip, span = page.locator("#tip").bounding_box(), texts.locator(".shade").last.bounding_box()
    below, above = tip["y"] - span["y"] - span["height"], span["y"] - tip["y"] - tip["height"]
    assert 0 <= max(below, above) < 20, "beside what it is about, and not upon it"


def test_twelve_answers_are_told_apart(visit: Visits) -> None:
    page = visit()
    write(page, [f"Boil it for {n} minutes." for n in range(12)])
    score(page)
    lines = page.locator("#chart path.line")
    expect(lines).to_have_count(12)
    looks = lines.evaluate_all(
        "all => all.map((one) => getComputedStyle(one).stroke + getComputedStyle(one).strokeDasharray)"
    )
    assert len(set(looks)) == 12


def test_motion_is_only_for_who_wants_it(visit: Visits) -> None:
    behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
    assert visit(reduced_motion="reduce").evaluate(behaviour) == "auto"
    assert visit(reduced_motion="no-preference").evaluate(behaviour) == "smooth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_are_legible(visit: Visits, scheme: str) -> None:
    page = visit(forced_colors="active", color_scheme=scheme)
    write(page)
    page.get_by_role("button", name="Theme").click()  # what the page's own theme says does not matter
    if scheme == "light":
        page.get_by_role("button", name="Theme").click()
    score(page)
    expect(page.locator("#chart path.line")).to_have_count(3)
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("getComputedStyle(document.querySelector('.plot text')).fill") == page.evaluate(
        "getComputedStyle(document.body).color"
    )
