"""The page at / in a real browser: headless Chromium against a server on loopback."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playground import COMPLETIONS, PROMPT, Visits, expect, score, serving, settled, visiting, write

from treeward.config.scoring import EnsembleConfig
from treeward.config.server import ServedModelConfig
from treeward.model.contract import CalibratedTemperature, RewardCalibration
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.scorer import Scorer
from treeward.serving.models import ServedModel

pytestmark = pytest.mark.slow  # a browser

TOKEN = "open-sesame"
IMAGE = "<img src=x onerror='window.injected=1'>"
SCRIPT = "<script>window.injected=1</script>"
HOSTILE = f'{IMAGE}{SCRIPT}\u202e & "quotes"'


@pytest.fixture(scope="module")
def url(served: tuple[ServedModel, Scorer]) -> Iterator[str]:
    scorer: Any = served[1]
    contract = scorer.contract
    fitted = CalibratedTemperature(value=2.5, nll_before=0.7, nll_after=0.6, num_pairs=100)
    calibrated = contract.model_copy(update={"calibration": RewardCalibration(temperature=fitted)})
    fitted_scorer = copy.copy(scorer)
    fitted_scorer.contract = calibrated
    warm = ServedModel.of(ServedModelConfig(models=("warm",)), fitted_scorer)
    pair = EnsembleScorer([scorer, scorer], EnsembleConfig(method="mean", standardize=False))
    names = ("results/a/final", "results/b/final")
    both = ServedModel.of(ServedModelConfig(name="both", models=names, ensemble=pair.config), pair)
    with serving([served, (warm, fitted_scorer), (both, pair)]) as address:
        yield address


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Visits]:
    with visiting(browser, url) as visits:
        yield visits


def number(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def shown(page: Any) -> list[float]:
    return [number(text) for text in page.locator(".score").all_inner_texts()]


def wanted(url: str, completions: list[str] = COMPLETIONS) -> list[float]:
    body = {"context": [{"role": "user", "content": PROMPT}], "completions": completions}
    return [row["score"] for row in httpx.post(f"{url}v1/rewards", json=body).json()["data"]]


def texts(page: Any) -> list[str]:
    result: list[str] = page.locator("#completions textarea").evaluate_all(
        "all => all.map((one) => one.value)",
    )
    return result


def test_scores_are_those_of_the_server(visit: Visits, url: str) -> None:
    page = visit()
    write(page)
    score(page)
    scores = wanted(url)
    assert shown(page) == pytest.approx(scores, abs=6e-4)
    best = scores.index(max(scores))
    expect(page.locator(".card.best h3")).to_contain_text(f"Completion {best + 1}")
    for a, first in enumerate(scores):
        cells = page.locator(f".matrix tbody tr:nth-child({a + 1}) td").all_inner_texts()
        for b, second in enumerate(scores):
            assert a == b or cells[b] == f"{100 / (1 + math.exp(second - first)):.1f}%"
    whole = sum(math.exp(score) for score in scores)
    portions = page.locator(".portion > span:last-child").all_inner_texts()
    assert portions == [f"{100 * math.exp(s) / whole:.1f}% to be the best of 3" for s in scores]
    expect(page.locator("#status")).to_contain_text("completion 1 ")


def test_the_model_is_chosen_and_its_temperature_is_used(visit: Visits, url: str) -> None:
    completions = [COMPLETIONS[0], COMPLETIONS[2]]  # their scores differ enough
    page = visit()
    write(page, completions)
    page.get_by_label("Model").select_option("warm")
    expect(page.locator("#model-facts")).to_contain_text("temperature 2.5")
    score(page)
    first, second = wanted(url, completions)
    cell = page.locator(".matrix tbody tr:nth-child(1) td:nth-child(3)").inner_text()
    assert abs(first - second) > 0.1
    assert cell == f"{100 / (1 + math.exp((second - first) / 2.5)):.1f}%"
    page.get_by_label("Model").select_option("both")
    expect(page.locator("#stale")).to_be_visible()
    score(page)
    expect(page.locator("#stale")).to_be_hidden()
    members = page.locator(".card").first.locator(".values li").all_inner_texts()
    assert [text.partition(":")[0] for text in members] == ["a", "b"]


def test_a_link_restores_the_text_and_tells_the_server_nothing(visit: Visits, url: str) -> None:
    page = visit()
    write(page, [*COMPLETIONS[:2], HOSTILE])
    page.get_by_role("button", name="Add a turn").click()
    page.get_by_label("Role of turn 2").select_option("tool")
    page.get_by_label("Text of turn 2").fill("Zeile 1\nZeile 2 \u6570\u5b57")
    page.get_by_label("Model").select_option("warm")
    page.get_by_role("button", name="Copy link").click()
    link = page.url
    assert link.startswith(f"{url}#j")
    other = visit(link)
    settled(other)  # it is scored at once
    expect(other.get_by_label("Model")).to_have_value("warm")
    fields = [other.get_by_label(f"Text of turn {i}").input_value() for i in (1, 2)]
    assert fields == [PROMPT, "Zeile 1\nZeile 2 \u6570\u5b57"]
    assert texts(other) == [
        *COMPLETIONS[:2],
        HOSTILE,
    ]
    assert other.get_by_label("Role of turn 2").input_value() == "tool"
    assert other.evaluate("window.injected") is None
    other.get_by_label("Text of turn 1").fill("Another prompt")
    expect(other).to_have_url(url)  # a link says what is there, or nothing
    damaged = visit(f"{url}#j%7B%22con")
    expect(damaged.locator("#trouble")).to_contain_text("link is damaged")


def test_a_token_is_asked_for_and_kept_in_the_tab(
    browser: Any,
    served: tuple[ServedModel, Scorer],
) -> None:
    with serving([served], token=TOKEN) as guarded:
        visit = Visits(browser, guarded)
        page = visit()
        expect(page.get_by_label("Token", exact=True)).to_be_focused()
        for token, words in (("wrong", "needs its token"), (TOKEN, "")):
            page.get_by_label("Token", exact=True).fill(token)
            page.keyboard.press("Enter")
            expect(page.locator("#trouble")).to_contain_text(words)
        expect(page.locator("#gate")).to_be_hidden()
        write(page, COMPLETIONS[:2])
        score(page)
        assert len(shown(page)) == 2
        assert page.evaluate("[sessionStorage.getItem('treeward-token'), localStorage.length]") == [
            TOKEN,
            0,
        ]
        page.get_by_role("button", name="Copy link").click()
        page.reload()
        expect(page.locator("html[data-ready]")).to_have_count(1)
        expect(page.locator("#gate")).to_be_hidden()
        assert not any(TOKEN in address for address in [page.url, *visit.asked])
        visit.contexts[0].close()
