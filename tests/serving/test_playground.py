"""The page at / in a real browser: headless Chromium against a server on loopback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from chromium import chromium
from playground import ANSWERS, QUESTION, Visits, answered, expect, score, serving, settled, visiting, write

from treeward.config.ensemble import EnsembleConfig
from treeward.config.reward_shaping import CalibratedTemperature, RewardCalibration
from treeward.scoring.ensemble import EnsembleScorer
from treeward.serving.models import ServedModel

TOKEN = "open-sesame"
HOSTILE = "<img src=x onerror='window.injected=1'><script>window.injected=1</script>\u202e & \"quotes\""
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def url(loaded_model: ServedModel) -> Iterator[str]:
    scorer: Any = loaded_model.scorer
    contract = loaded_model.contracts[0]
    fitted = CalibratedTemperature(value=2.5, nll_before=0.7, nll_after=0.6, num_pairs=100)
    calibrated = contract.model_copy(update={"calibration": RewardCalibration(temperature=fitted)})
    warm = ServedModel("warm", scorer, contracts=[calibrated], members=["warm"])
    pair = EnsembleScorer([scorer, scorer], EnsembleConfig(method="mean", standardize=False))
    both = ServedModel("both", pair, members=["results/a/final", "results/b/final"])
    with serving([loaded_model, warm, both]) as address:
        yield address


@pytest.fixture(scope="module")
def guarded_url(loaded_model: ServedModel) -> Iterator[str]:
    with serving([loaded_model], token=TOKEN) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Visits]:
    with visiting(browser, url) as visits:
        yield visits


def number(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def shown(page: Any) -> list[float]:
    return [number(text) for text in page.locator(".score").all_inner_texts()]


def ask(url: str, path: str, **body: Any) -> Any:
    got = httpx.post(f"{url}{path}", json=body)
    assert got.status_code == 200, got.text
    return got.json()


def wanted(url: str, answers: list[str] = ANSWERS, **body: Any) -> list[float]:
    context = [{"role": "user", "content": QUESTION}]
    rows = ask(url, "v1/rewards", context=context, completions=answers, **body)["data"]
    return [row["score"] for row in rows]


def test_scores_are_those_of_the_server(visit: Visits, url: str) -> None:
    page = visit()
    write(page)
    score(page)
    scores = wanted(url)
    assert shown(page) == pytest.approx(scores, abs=6e-4)
    best = scores.index(max(scores))
    expect(page.locator(".card.best h3")).to_contain_text(f"Answer {best + 1}")
    for a, first in enumerate(scores):
        cells = page.locator(f".matrix tbody tr:nth-child({a + 1}) td").all_inner_texts()
        for b, second in enumerate(scores):
            if a != b:
                assert cells[b] == f"{100 / (1 + math.exp(second - first)):.1f}%"
    whole = sum(math.exp(score) for score in scores)
    portions = page.locator(".portion > span:last-child").all_inner_texts()
    assert portions == [f"{100 * math.exp(s) / whole:.1f}% to be the best of 3" for s in scores]
    expect(page.get_by_role("status").first).to_contain_text("3 scores: answer 1")
    assert page.evaluate("window.injected") is None


def test_the_model_is_chosen_and_its_temperature_is_used(visit: Visits, url: str) -> None:
    answers = [ANSWERS[0], ANSWERS[2]]  # their scores differ enough
    page = visit()
    write(page, answers)
    page.get_by_label("Model").select_option("warm")
    expect(page.locator("#model-facts")).to_contain_text("temperature 2.5")
    score(page)
    first, second = wanted(url, answers)
    assert abs(first - second) > 0.1
    cell = page.locator(".matrix tbody tr:nth-child(1) td:nth-child(3)").inner_text()
    assert cell == f"{100 / (1 + math.exp((second - first) / 2.5)):.1f}%"
    page.get_by_label("Model").select_option("both")
    expect(page.locator("#stale")).to_be_visible()
    score(page)
    expect(page.locator("#stale")).to_be_hidden()
    members = page.locator(".card").first.locator(".values li").all_inner_texts()
    assert [text.partition(":")[0] for text in members] == ["a", "b"]
    assert [number(text.partition(": ")[2]) for text in members] == pytest.approx([first, first], abs=6e-4)


def test_heads_and_truncation_are_told(visit: Visits) -> None:
    page = visit()
    row = {"score": 1.25, "reward": 1.25, "truncated": True, "heads": [2.0, -1.5]}
    answered(page, [row, {"score": None, "reward": None, "error": "not finite"}], heads=["helpful", "brief"])
    write(page, ANSWERS[:2])
    score(page)
    first, second = page.locator(".card").all_inner_texts()
    for words in ("helpful: 2.000", "brief: \u22121.500", "9 of 160", "cut at its beginning"):
        assert words in first
    assert "No score: not finite" in second
    expect(page.locator("#verdict")).to_contain_text("One score alone says little")
    expect(page.get_by_role("status").first).to_contain_text(
        "1 score, 1 failed: answer 1 1.250, answer 2 has no score."
    )


def test_the_reward_decides_and_the_score_is_named_beside_it(visit: Visits) -> None:
    page = visit()
    rows = [
        {"score": 1.2, "reward": -1.0},
        {"score": 0.4, "reward": 0.3},
        {"score": 2.0, "reward": None, "error": "no reference"},
    ]
    answered(page, rows, shaped=True)
    write(page, ANSWERS)
    score(page)
    assert shown(page) == [-1.0, 0.3]
    expect(page.locator(".what")).to_have_text(["reward, shaped"] * 2)
    assert [text.split()[1] for text in page.locator(".card dl").all_inner_texts()] == ["1.200", "0.400", "2.000"]
    expect(page.locator(".card.best h3")).to_have_text("Answer 2preferred")
    best = 1 / (1 + math.exp(0.4 - 2.0))
    expect(page.locator("#verdict")).to_have_text(
        "Answer 2 is preferred, as its reward is the highest; by score answer 3 would be preferred over it, with a "
        f"probability of {100 * best:.1f}%."
    )
    expect(page.locator(".card").nth(2)).to_contain_text("No reward: no reference")
    whole = sum(math.exp(row["score"]) for row in rows)
    portions = page.locator(".portion > span:last-child").all_inner_texts()
    assert portions == [f"{100 * math.exp(r['score']) / whole:.1f}% to be the best of 3, by score" for r in rows]
    expect(page.locator("#pairs-note")).to_contain_text("rewards are shaped, these are of scores")
    expect(page.get_by_role("status").first).to_contain_text(
        "2 rewards, 1 failed: answer 1 \u22121.000, answer 2 0.300"
    )


def test_where_reward_and_score_agree_the_verdict_is_one(visit: Visits) -> None:
    page = visit()
    answered(page, [{"score": 1.2, "reward": 0.9}, {"score": 0.4, "reward": 0.3}], shaped=True)
    write(page, ANSWERS[:2])
    score(page)
    chance = 100 / (1 + math.exp(0.4 - 1.2))
    expect(page.locator("#verdict")).to_have_text(
        "Answer 1 is preferred, as its reward is the highest; by score it is preferred over answer 2 with a "
        f"probability of {chance:.1f}%."
    )


def test_equal_rewards_of_other_scores_are_a_tie(visit: Visits) -> None:
    page = visit()
    rows = [{"score": value, "reward": reward} for value, reward in ((3.0, 1.0), (2.0, 1.0), (5.0, 0.5))]
    answered(page, rows, shaped=True)
    write(page)
    score(page)
    expect(page.locator("#verdict")).to_have_text(
        "Answers 1 and 2 have the same reward, the highest: none is preferred."
    )
    expect(page.locator(".badge")).to_have_count(0)


def test_the_chart_and_its_table_are_the_trace(visit: Visits, url: str) -> None:
    page = visit()
    write(page)
    score(page)
    context = [{"role": "user", "content": QUESTION}]
    traces = [ask(url, "v1/rewards/trace", context=context, completion=answer, max_points=128) for answer in ANSWERS]
    expect(page.locator("#chart path.line")).to_have_count(3)
    page.locator("#numbers summary").click()
    for i, trace in enumerate(traces):
        rows = page.locator("#tables table").nth(i).locator("tbody tr td:nth-child(3)").all_inner_texts()
        assert [number(text) for text in rows] == pytest.approx([p["score"] for p in trace["points"]], abs=6e-4)
        assert page.locator(".text .words").nth(i).text_content() == ANSWERS[i]
        box = page.locator("#chart path.line").nth(i).bounding_box()
        assert box["width"] > 20
    plot = page.locator(".plot")
    place = plot.bounding_box()
    plot.hover(position={"x": place["width"] - 14, "y": 100})
    longest = max(len(trace["tokens"]) for trace in traces)
    expect(page.locator("#tip")).to_contain_text(f"token {longest}")
    expect(page.locator(".shade.current")).to_have_count(1)
    page.locator(".text .shade").nth(2).hover()
    expect(page.locator("#tip")).to_contain_text("token 3")
    page.get_by_role("checkbox", name="over the tokens too").uncheck()
    score(page)
    expect(page.locator("#trace")).to_be_hidden()


def test_a_link_restores_the_text_and_tells_the_server_nothing(visit: Visits, url: str) -> None:
    page = visit()
    write(page, [*ANSWERS[:2], HOSTILE])
    page.get_by_role("button", name="Add a turn").click()
    page.get_by_label("Role of turn 2").select_option("tool")
    page.get_by_label("Text of turn 2").fill("Zeile 1\nZeile 2 \u6570\u5b57")
    page.get_by_label("Model").select_option("warm")
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("status").first).to_contain_text("link")
    link = page.url
    assert link.startswith(f"{url}#z") and "egg" not in link
    other = visit(link)
    settled(other)  # it is scored at once
    expect(other.get_by_label("Model")).to_have_value("warm")
    fields = [other.get_by_label(f"Text of turn {i}").input_value() for i in (1, 2)]
    assert fields == [QUESTION, "Zeile 1\nZeile 2 \u6570\u5b57"]
    assert other.get_by_label("Role of turn 2").input_value() == "tool"
    assert other.locator("#answers textarea").evaluate_all("all => all.map((one) => one.value)") == [
        *ANSWERS[:2],
        HOSTILE,
    ]
    assert other.evaluate("window.injected") is None
    assert not any(link.partition("#")[2] in address.partition("#")[0] for address in visit.asked)
    other.get_by_label("Text of turn 1").fill("Another question")
    expect(other).to_have_url(url)  # a link says what is there, or nothing


def test_a_damaged_link_says_so(visit: Visits, url: str) -> None:
    page = visit(f"{url}#zAAAA")
    expect(page.get_by_role("alert").first).to_contain_text("link is damaged")
    write(page)
    score(page)
    assert len(shown(page)) == 3


def test_a_link_that_would_fill_the_memory_is_stopped(visit: Visits, url: str) -> None:
    import base64
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packer.compress(b"[" + b" " * 40_000_000 + b"]") + packer.flush()
    page = visit(f"{url}#z{base64.urlsafe_b64encode(bomb).decode().rstrip('=')}")
    expect(page.get_by_role("alert").first).to_contain_text("too much text")


FOUR, FIVE = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
PASTED = {
    "messages": (json.dumps([*MESSAGES, FOUR]), 2, ["4"]),
    "object": (json.dumps({"messages": MESSAGES}), 2, ["", ""]),
    "body": (json.dumps({"context": MESSAGES, "completions": ["4", [FIVE]]}), 2, ["4", "5"]),
    "preference": (json.dumps({"prompt": "2?", "chosen": "4", "rejected": ["5", [FOUR]]}), 1, ["4", "5", "4"]),
    "whole": (json.dumps({"chosen": [*MESSAGES, FOUR], "rejected": [*MESSAGES, FIVE]}), 2, ["4", "5"]),
    "ranked": (json.dumps({"context": MESSAGES, "completions": [{"rank": 0, "completion": [FOUR]}]}), 2, ["4"]),
    "conversations": (json.dumps({"conversations": [[*MESSAGES, FOUR], [*MESSAGES, FIVE]]}), 2, ["4", "5"]),
    "sharegpt": (json.dumps([{"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}]), 1, ["4"]),
    "parts": (
        json.dumps([MESSAGES[1], {"role": "assistant", "content": [{"type": "text", "text": "4"}], "name": "me"}]),
        1,
        ["4"],
    ),
    "transcript": ("User: 2 + 2?\nPlease.\n\nAssistant: 4\nor so\n", 1, ["4\nor so"]),
    "human": ("Human: 2 + 2?\nAI: 4\nHuman: really?\nAI: Yes", 3, ["Yes"]),
}  # fmt: skip


def test_what_is_pasted_is_read(visit: Visits) -> None:
    page = visit()
    for name, (text, turns, answers) in PASTED.items():
        page.get_by_role("button", name="Clear").click()
        page.get_by_role("button", name="Paste JSON or a transcript").click()
        page.locator("#paste-text").fill(text)
        page.keyboard.press("Control+Enter")
        expect(page.locator("#paste-dialog")).to_be_hidden()
        got = page.locator("#answers textarea").evaluate_all("all => all.map((one) => one.value)")
        assert (page.locator(".turn").count(), got) == (turns, answers), name
        assert page.locator(".extras").all_inner_texts() == (["with name"] if name == "parts" else [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no text"),
        ('{"messages": [', "begins like JSON"),
        ("Once upon a time", "role"),
        ('[{"content": "4"}]', "messages[0] has no role"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "shows text only"),
        ('{"prompt": "a", "completions": "b"}', "must be a list"),
        ("{}", "no messages"),
    ],
)
def test_what_cannot_be_pasted_says_why_and_changes_nothing(visit: Visits, text: str, why: str) -> None:
    page = visit()
    write(page, ANSWERS[:2])
    page.get_by_role("button", name="Paste JSON or a transcript").click()
    page.locator("#paste-text").fill(text)
    page.get_by_role("button", name="Use it", exact=True).last.click()
    expect(page.locator("#paste-trouble")).to_contain_text(why)
    page.keyboard.press("Escape")
    expect(page.locator("#paste-dialog")).to_be_hidden()
    expect(page.get_by_label("Text of turn 1")).to_have_value(QUESTION)


def test_json_is_a_body_that_the_server_reads(visit: Visits, url: str) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    write(page)
    page.get_by_role("button", name="Copy JSON").click()
    expect(page.get_by_role("status").first).to_contain_text("Copied as JSON")
    body = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert body == {"context": [{"role": "user", "content": QUESTION}], "completions": ANSWERS}
    score(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    saved = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert {key: saved[key] for key in body} == body
    assert [row["score"] for row in saved["results"]["data"]] == pytest.approx(wanted(url), abs=1e-5)
    assert len(saved["results"]["traces"]) == 3


def test_what_cannot_be_scored_says_why_in_words(visit: Visits) -> None:
    page = visit()
    write(page, ["word " * 400, "Yes!"])
    score(page)
    expect(page.locator(".card").first).to_contain_text("No score: too long to score")
    assert len(shown(page)) == 1
    expect(page.locator("#chart path.line")).to_have_count(1)
    page.get_by_role("button", name="Remove answer 1").click()
    page.get_by_role("button", name="Remove answer 1").click()
    page.get_by_role("button", name="Score").click()
    expect(page.get_by_role("alert").first).to_contain_text("no answer to score")


def test_an_empty_answer_is_scored_and_has_no_trace(visit: Visits, url: str) -> None:
    page = visit()
    write(page, ["", "Yes!"])
    score(page)
    assert shown(page) == pytest.approx(wanted(url, ["", "Yes!"]), abs=6e-4)
    expect(page.locator("#chart path.line")).to_have_count(1)
    assert len([address for address in visit.asked if address.endswith("/trace")]) == 1


def test_a_server_that_is_away_or_refuses_is_told_in_words(visit: Visits) -> None:
    page = visit()
    write(page, ANSWERS[:2])
    answer = {"error": {"message": "20000 conversations are waiting", "code": "queue_full", "request_id": "abc"}}
    page.route("**/v1/rewards", lambda route: route.fulfill(status=429, json=answer, headers={"Retry-After": "7"}))
    page.get_by_role("button", name="Score").click()
    alert = page.get_by_role("alert").first
    expect(alert).to_contain_text("has too much to do: 20000 conversations are waiting. Try again in 7 s.")
    page.unroute("**/v1/rewards")
    page.route("**/v1/rewards", lambda route: route.fulfill(status=502, body="<html>Bad gateway</html>"))
    page.get_by_role("button", name="Score").click()
    expect(alert).to_contain_text("HTTP 502")
    page.unroute("**/v1/rewards")
    page.route("**/v1/rewards", lambda route: route.abort())
    page.get_by_role("button", name="Score").click()
    expect(alert).to_contain_text("cannot be reached")
    page.unroute("**/v1/rewards")
    score(page)
    expect(alert).to_have_text("")
    assert len(visit.said) == 3 and all("Failed to load resource" in line for line in visit.said), visit.said
    visit.said.clear()


def test_a_token_is_asked_for_and_kept_in_the_tab(browser: Any, guarded_url: str) -> None:
    visit = Visits(browser, guarded_url)
    page = visit()
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    page.get_by_label("Token", exact=True).fill("wrong \u6570")
    page.keyboard.press("Enter")
    expect(page.locator("#gate-words")).to_contain_text("does not accept this token")
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#gate")).to_be_hidden()
    write(page, ANSWERS[:2])
    score(page)
    assert len(shown(page)) == 2
    assert page.evaluate("[sessionStorage.getItem('treeward-token'), localStorage.length]") == [TOKEN, 0]
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("status").first).to_contain_text("link")
    assert TOKEN not in page.url
    page.reload()
    expect(page.locator("html[data-ready]")).to_have_count(1)
    expect(page.locator("#gate")).to_be_hidden()
    assert not any(TOKEN in address for address in visit.asked)
    assert all("401" in line for line in visit.said), visit.said
    visit.contexts[0].close()


def test_a_reload_keeps_what_was_written_and_clearing_is_undone(visit: Visits) -> None:
    page = visit()
    write(page)
    page.reload()
    expect(page.get_by_label("Text of answer 3")).to_have_value(ANSWERS[2])
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#answers textarea")).to_have_count(2)
    expect(page.get_by_label("Text of answer 1")).to_have_value("")
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Text of answer 3")).to_have_value(ANSWERS[2])
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Text of turn 1").fill("Another")
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)


def test_a_browser_that_keeps_nothing_is_no_trouble(visit: Visits) -> None:
    page = visit()
    full = "() => { throw new DOMException('full', 'QuotaExceededError'); }"
    page.evaluate(f"() => {{ Storage.prototype.setItem = {full}; }}")
    write(page)
    score(page)
    assert len(shown(page)) == 3


def test_empty_answers_are_told_and_never_preferred(visit: Visits, url: str) -> None:
    page = visit()
    page.get_by_role("button", name="Score").click()
    expect(page.locator("#trouble")).to_have_text("The answers are empty: write at least one.")
    expect(page.locator("#results")).to_be_hidden()
    write(page, ["", ANSWERS[0]])
    rows = [
        {"index": i, "score": score, "reward": score, "num_tokens": 9, "truncated": False, "error": None}
        for i, score in enumerate([2.0, 1.0])
    ]
    page.route("**/v1/rewards", lambda route: route.fulfill(json={"model": "tiny", "contract": None, "data": rows}))
    score(page)
    expect(page.locator("#trouble")).to_have_text("")
    expect(page.locator("#verdict")).to_contain_text("Answer 1 is preferred, though it is empty; over answer 2")
    expect(page.locator(".card").first).to_contain_text("the answer is empty")
    expect(page.locator(".badge")).to_have_count(0)
    expect(page.locator("#chart path.line")).to_have_count(1)
    expect(page.locator("#trace-status")).to_have_text("")


def test_nothing_is_preferred_in_a_tie(visit: Visits, url: str) -> None:
    page = visit()
    write(page, [ANSWERS[0], ANSWERS[0]])
    score(page)
    expect(page.locator("#verdict")).to_have_text("Answers 1 and 2 have the same score: none is preferred.")
    expect(page.locator(".badge")).to_have_count(0)
