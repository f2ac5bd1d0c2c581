"""`Problem`: a problem with its solutions as steps; `step_tree`: the solutions as one tree, in
which equal beginnings are one node.

    problem = Problem(context, (
        (Step("2 + 3 = 5", 1.0), Step("5 * 2 = 10", 1.0)),
        (Step("2 + 3 = 5", 1.0), Step("5 * 2 = 12", 0.0)),
    ))
    nodes = step_tree(problem.solutions)      # three nodes; the first has a count of 2
    paths_of(nodes)                           # [[0, 1], [0, 2]]

Merging is exact, because cross-entropy is linear in the label: n copies of a step cost what one
node of weight n with their mean label costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeward.data.conversation import Conversation, Message, Messages


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a solution. `label`: the probability that it is right, 0 or 1 where it was judged;
    None for a step that nobody has judged."""

    text: str
    label: float | None = None


Solution = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """The `context` (messages) and the `solutions` of one row, or of all rows with this context.
    `template_kwargs`: the row's tools and further variables of the chat template."""

    context: Messages
    solutions: tuple[Solution, ...]
    task_name: str = "steps"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def context_key(self) -> str:
        """The context as text: problems with the same one are one tree."""
        parts: list[Any] = list(self.context)
        if self.template_kwargs:
            parts = [parts, dict(self.template_kwargs)]
        return json.dumps(parts, sort_keys=True, default=str)

    def conversation(self, completion: Message) -> Conversation:
        """The context with a completion."""
        messages = [*self.context, completion]
        return Conversation(messages, chat_template_kwargs=self.template_kwargs)

    @property
    def texts(self) -> list[str]:
        """The text of every message and step, to train a tokenizer on."""
        texts = []
        for message in self.context:
            if isinstance(message.get("content"), str):
                texts.append(message["content"])
        for solution in self.solutions:
            texts += [step.text for step in solution]
        return texts


@dataclass(slots=True)
class StepNode:
    """A step that follows the same steps in all solutions that have it. `parent`: the node of the
    step before it. `count`: how many solutions have judged it; `label`: their mean label, None
    where that is none. `is_end`: whether a solution ends with it."""

    text: str
    parent: int | None
    count: int = 0
    label_sum: float = 0.0
    is_end: bool = False

    @property
    def label(self) -> float | None:
        if self.count == 0:
            return None
        return self.label_sum / self.count


def step_tree(solutions: Sequence[Solution]) -> list[StepNode]:
    """The nodes of the solutions, in the order in which they first occur."""
    nodes: list[StepNode] = []
    # By the step before it too: the same text after other steps is another step.
    places: dict[tuple[int | None, str], int] = {}
    for solution in solutions:
        parent: int | None = None
        for step in solution:
            key = (parent, step.text)
            if key not in places:
                places[key] = len(nodes)
                nodes.append(StepNode(step.text, parent))
            parent = places[key]
            node = nodes[parent]
            if step.label is not None:
                node.count += 1
                node.label_sum += step.label
        if parent is not None:
            nodes[parent].is_end = True
    return nodes


def paths_of(nodes: Sequence[StepNode]) -> list[list[int]]:
    """The nodes from the first step to each last one, up to the last step with a label. A path
    without a label, or within another path, is none."""
    is_inner = {node.parent for node in nodes}
    paths: dict[tuple[int, ...], None] = {}  # an ordered set: two paths may end at one node
    for i in range(len(nodes)):
        if i in is_inner:
            continue
        path: list[int] = []
        place: int | None = i
        while place is not None:
            # What follows the last label is neither read nor computed.
            if path or nodes[place].count > 0:
                path.append(place)
            place = nodes[place].parent
        if path:
            paths[tuple(reversed(path))] = None
    covered = beginnings_of(paths)
    return [list(path) for path in paths if path not in covered]


def beginnings_of(paths: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """What the paths begin with, without the paths themselves."""
    beginnings: set[tuple[int, ...]] = set()
    for path in paths:
        for end in range(1, len(path)):
            beginnings.add(path[:end])
    return beginnings


def with_last_labels(problem: Problem) -> Problem:
    """The problem with the last label of each solution alone."""
    solutions: list[Solution] = []
    for solution in problem.solutions:
        steps = [Step(step.text) for step in solution]
        # Not simply the last step: the steps after a wrong one often have no label.
        labelled = [i for i, step in enumerate(solution) if step.label is not None]
        if labelled:
            steps[labelled[-1]] = solution[labelled[-1]]
        solutions.append(tuple(steps))
    return replace(problem, solutions=tuple(solutions))


def marked_completion(texts: Sequence[str], mark: str) -> Message:
    """The completion of these steps, with the mark after each."""
    return {"role": "assistant", "content": "".join(f"{text}{mark}" for text in texts)}
