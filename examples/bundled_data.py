"""How the bundled data was made, the same on every machine; nothing in the package needs it.

python examples/bundled_data.py src/treeward/data/bundled      # writes the committed files, byte
for byte

A row is a question and two to five completions, ranked by their gold quality, which is kept as
`score`; equal quality is an equal rank. There is no label noise. The data plants on purpose:

- In `train` and `validation` the better completion is the longer one in about 78% of the pairs, by filler without
  content.
- In `length_controlled` it is so in half of the pairs, and the gap is wide: a reward model that likes length for its
  own sake loses accuracy there, on the pairs whose better completion is the shorter.
- No completion loops or trails off. Nothing teaches a reward model about such text, as in real preference data.
- Most wrong completions name words that are never right (`Kind.decoys`); the rest answer another question of the kind.

The held-out splits ask known facts in combinations of fact, phrasing and format that `train` never
shows. Only `random.Random` is used, over tuples, so that a seed means the same bytes everywhere.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gold import (
    FILLERS,
    FORMATS,
    KINDS,
    LEAD_INS,
    POLITE_CLOSERS,
    POLITE_OPENERS,
    RUDE_CLOSERS,
    RUDE_OPENERS,
    Fact,
    Question,
    grade,
    parse_question,
)

from treeward.data.conversation import Message

Row = dict[str, Any]
_SEED = 17
_LONGER_IS_BETTER = (
    0.82  # comparisons whose better completion is padded to be the longer, if its format allows
)
_HELD_OUT_SHARE = 0.15
_TIED_ROWS = 0.05
_DECOYS = 0.88  # wrong answers that are never right
_FILLERS_TO_THE_BETTER = (50, 30, 13, 5, 2)  # weights of 0, 1, 2, ... fillers
_FILLERS_TO_THE_WORSE = (42, 29, 16, 8, 5)
_SAME_WORDING = 0.6  # comparisons whose completions share their sentences, except for the differences of their plans
_WIDE_GAP = 50  # characters
_KIND = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class _Ask:
    """A combination that is either in training or held out."""

    fact: Fact
    phrasing: str
    format: str | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The properties of a completion; `style` is the format that it follows, requested or not."""

    correct: bool
    style: str | None
    tone: str
    num_fillers: int = 0


def generate() -> dict[str, list[Row]]:
    """All splits: `train`, `validation` and `length_controlled`, each a list of rows in the rank
    format."""
    rng = random.Random(_SEED)
    asks = [
        _Ask(fact, phrasing, name)
        for kind in KINDS
        for fact in kind.facts
        for phrasing in (*kind.phrasings, kind.follow_up)
        for name in (None, *kind.formats)
    ]
    rng.shuffle(asks)
    num_held_out = int(_HELD_OUT_SHARE * len(asks))
    held_out, taught = asks[:num_held_out], asks[num_held_out:]
    seen: set[str] = set()
    return {
        "train": _split(rng, taught, 3500, seen),
        "validation": _split(rng, held_out, 400, seen),
        "length_controlled": _split(rng, held_out, 400, seen, controlled=True),
    }


def _split(
    rng: random.Random,
    asks: Sequence[_Ask],
    num_rows: int,
    seen: set[str],
    *,
    controlled: bool = False,
) -> list[Row]:
    rows: list[Row] = []
    balance = 0  # pairs whose better completion is longer, less those whose better one is shorter
    by_kind = {kind.name: [ask for ask in asks if ask.fact.kind == kind.name] for kind in KINDS}
    while len(rows) < num_rows:
        ask = rng.choice(by_kind[rng.choice(KINDS).name])
        if controlled:
            longer = balance < 0 or (balance == 0 and rng.random() < 0.5)
            row = _controlled_row(rng, ask, longer_is_better=longer)
        else:
            row = _plain_row(rng, ask, longer_is_better=rng.random() < _LONGER_IS_BETTER)
        key = json.dumps(row)
        if row is None or key in seen:
            continue
        seen.add(key)
        rows.append(row)
        balance += sum((gap > 0) - (gap < 0) for gap in length_gaps(row))
    return rows


def length_gaps(row: Row) -> list[int]:
    """Characters of the better completion less those of the worse, for every pair of different
    rank."""
    marks = [
        (completion["rank"], len(completion["completion"][0]["content"]))
        for completion in row["completions"]
    ]
    return [
        b[1] - a[1] if b[0] < a[0] else a[1] - b[1]
        for a, b in itertools.combinations(marks, 2)
        if a[0] != b[0]
    ]


def _plain_row(rng: random.Random, ask: _Ask, *, longer_is_better: bool) -> Row | None:
    context, row = _context(rng, ask), None
    num_completions = rng.choices((2, 3, 4, 5), (74, 14, 8, 4))[0]
    weights = _FILLERS_TO_THE_BETTER if longer_is_better else _FILLERS_TO_THE_WORSE
    tied = rng.random() < _TIED_ROWS
    for _ in range(8):
        fillers = sorted(
            rng.choices(range(5), weights, k=num_completions), reverse=not longer_is_better
        )
        row = _row(rng, ask, context, fillers, tied=tied) or row
        if row is not None and all((gap > 0) == longer_is_better for gap in length_gaps(row)):
            break
    return row  # in the other direction when a format leaves no choice: one word is always short


def _controlled_row(rng: random.Random, ask: _Ask, *, longer_is_better: bool) -> Row | None:
    if ask.format == "one_word":  # the good answer cannot be the longer one
        return None
    context = _context(rng, ask)
    num_completions = rng.choices((2, 3), (75, 25))[0]
    for _ in range(50):
        fillers = sorted(
            [0, rng.choice((2, 3, 4)), 6][:num_completions], reverse=not longer_is_better
        )
        row = _row(rng, ask, context, fillers, tied=False)
        gaps = length_gaps(row) if row else []
        if gaps and all(
            gap >= _WIDE_GAP if longer_is_better else gap <= -_WIDE_GAP for gap in gaps
        ):
            return row
    return None


def _row(
    rng: random.Random, ask: _Ask, context: list[Message], fillers: Sequence[int], *, tied: bool
) -> Row | None:
    """A row whose completions have `fillers` filler sentences each, worst first; None if they came
    out amiss."""
    plans = _plans(rng, ask, len(fillers), tied)
    question = Question(ask.fact, ask.format)
    worst_first = sorted(range(len(plans)), key=lambda i: _promise(ask, plans[i]))
    for i, num_fillers in zip(worst_first, fillers, strict=True):
        plans[i] = replace(plans[i], num_fillers=num_fillers)
    wordings = [rng.getrandbits(32) for _ in plans]
    if rng.random() < _SAME_WORDING:
        wordings = wordings[:1] * len(plans)
    texts = [
        _completion(random.Random(wording), ask, plan)
        for wording, plan in zip(wordings, plans, strict=True)
    ]
    scores = [grade(question, text) for text in texts]
    if len(set(texts)) < len(texts) or (len(set(scores)) == 1) != tied:
        return None
    better = sorted(set(scores), reverse=True)
    return {
        "context": context,
        "completions": [
            {
                "rank": better.index(score),
                "completion": [_message("assistant", text)],
                "score": score,
            }
            for text, score in zip(texts, scores, strict=True)
        ],
    }


def _plans(rng: random.Random, ask: _Ask, num_completions: int, tied: bool) -> list[_Plan]:
    base = _Plan(rng.random() < 0.8, _style(rng, ask, kept=rng.random() < 0.8), _tone(rng))
    if tied:
        return [base] * num_completions
    plans = [base]
    while len(plans) < num_completions:
        plan = rng.choice(plans)
        for aspect in rng.sample(
            ("correct", "correct", "style", "tone"), rng.choices((1, 2), (88, 12))[0]
        ):
            if aspect == "style" and ask.format is not None:
                plan = replace(plan, style=_style(rng, ask, kept=plan.style != ask.format))
            elif aspect == "tone":
                plan = replace(
                    plan, tone=rng.choice(("plain", "rude")) if plan.tone == "polite" else "polite"
                )
            else:
                plan = replace(plan, correct=not plan.correct)
        plans.append(plan)
    rng.shuffle(plans)
    return plans


def _promise(ask: _Ask, plan: _Plan) -> float:
    kept = ask.format in (None, plan.style)
    courteous = plan.tone == "polite" or (
        plan.tone == "plain" and kept and ask.format == "one_word"
    )
    return 0.6 * plan.correct + 0.25 * kept + 0.15 * courteous


def _tone(rng: random.Random) -> str:
    return rng.choices(("polite", "plain", "rude"), (60, 20, 20))[0]


def _style(rng: random.Random, ask: _Ask, *, kept: bool) -> str | None:
    if kept and ask.format is not None:
        return ask.format
    others = [name for name in _KIND[ask.fact.kind].formats if name not in (ask.format, "one_word")]
    return rng.choice(others) if rng.random() < 0.12 else None


def _context(rng: random.Random, ask: _Ask) -> list[Message]:
    kind, fact = _KIND[ask.fact.kind], ask.fact
    messages: list[Message] = []
    request = f" {rng.choice(FORMATS[ask.format])}" if ask.format else ""
    lead_in = f"{rng.choice(LEAD_INS)} " if rng.random() < 0.4 else ""
    earlier_turn = ask.phrasing == kind.follow_up
    place = (
        rng.choices(("turn", "system", "earlier"), (65, 20, 15 if earlier_turn else 0))[0]
        if request
        else "turn"
    )
    if place == "system":
        messages.append(_message("system", f"You are a helpful assistant.{request}"))
    elif rng.random() < 0.08:
        messages.append(_message("system", "You are a helpful assistant."))
    question = ask.phrasing.format(x=fact.subject)
    if earlier_turn:
        other = rng.choice([other for other in kind.facts if other != fact])
        opening = f"{lead_in}{rng.choice(kind.phrasings).format(x=other.subject)}"
        standing = f" From now on:{request}" if place == "earlier" else ""
        style = ask.format if place != "turn" else None
        messages.append(_message("user", opening + standing))
        earlier = _completion(
            rng,
            _Ask(other, ask.phrasing, style),
            _Plan(True, style, rng.choice(("polite", "plain"))),
        )
        messages.append(_message("assistant", earlier))
        lead_in = ""
    in_turn = request if place == "turn" else ""
    messages.append(_message("user", f"{lead_in}{question}{in_turn}"))
    assert parse_question(messages) == Question(fact, ask.format)
    return messages


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _completion(rng: random.Random, ask: _Ask, plan: _Plan) -> str:
    """The text of a completion as planned."""
    # The first draws are the same for two plans with the same seed.
    statement = rng.choice(_KIND[ask.fact.kind].statements)
    opener, closer = _dressing(rng, plan)
    words = _words(rng, ask.fact, correct=plan.correct)
    if plan.style == "one_word" and plan.tone != "rude":
        return f"{_capitalised(words[0])}."
    fillers = rng.sample(FILLERS, plan.num_fillers)
    if plan.style == "dashes":
        listed = "\n".join(f"- {word}" for word in words)
        return "\n".join(
            part
            for part in (opener, listed, " ".join([*fillers, *closer.split(" ")]).strip())
            if part
        )
    named = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    named = f"[{named}]" if plan.style == "brackets" else named
    statement = _capitalised(statement.format(x=ask.fact.subject, a=named))
    if plan.style == "one_word":
        statement = f"{_capitalised(named)}."
    text = " ".join(part for part in (opener, statement, *fillers, closer) if part)
    if plan.style == "begin":
        return f"Answer: {text}"
    return f"{text} Over." if plan.style == "end" else text


def _words(rng: random.Random, fact: Fact, *, correct: bool) -> list[str]:
    if correct:
        return rng.sample(fact.answers, fact.num_answers)
    kind, subject = _KIND[fact.kind], fact.subject.split(" ")
    others = dict.fromkeys(word for other in kind.facts for word in other.answers)
    rivals = tuple(word for word in others if word not in fact.answers and word not in subject)
    num_wrong = rng.randint(1, fact.num_answers)
    words = rng.sample(kind.decoys if rng.random() < _DECOYS else rivals, num_wrong) + rng.sample(
        fact.answers, fact.num_answers - num_wrong
    )
    rng.shuffle(words)
    return words


def _dressing(rng: random.Random, plan: _Plan) -> tuple[str, str]:
    openers, closers = (
        (POLITE_OPENERS, POLITE_CLOSERS) if plan.tone == "polite" else (RUDE_OPENERS, RUDE_CLOSERS)
    )
    opener, closer, first = rng.choice(openers), rng.choice(closers), rng.random() < 0.5
    if plan.tone == "plain":
        return "", ""
    return (opener, "") if first else ("", closer)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def main(folder: str) -> None:
    """Write every split into the folder, one row a line."""
    for split, rows in generate().items():
        lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
        (Path(folder) / f"{split}.jsonl").write_bytes("".join(lines).encode())


if __name__ == "__main__":
    main(sys.argv[1])
