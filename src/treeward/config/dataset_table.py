"""`COMPARISON_SETS`, `STEP_SETS` and `PROMPT_SETS`: every data set and format that has a name, one
entry each.

    KnownDataset(
        name="HelpSteer3",
        rows=("`context`, `response1`, `response2`, ...",),           # for docs/data.md
        parser="helpsteer.from_helpsteer3_row",                       # of `treeward.data`
        forms=(Form(("response1", "response2"), ("overall_preference",)),),
        hub_path="nvidia/HelpSteer3",
        validation_splits={"default": "validation"},
    ),

`dataset_name` chooses an entry. All that is known of a name is derived from its entry: whether a
configuration needs a `data_path`, which splits it gets, which format a file has, what `score`
reads, and the tables of docs/data.md. Functions are named by text, because this layer cannot import
`treeward.data`, which reads the entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any


@dataclass(frozen=True, slots=True)
class Form:
    """The keys by which a row of a file is told.

    `completions`: the column of its completions, or those of its two sides. `others`: what it must
    have beside them. A form without `others` is told by the completions alone, so `score` reads
    them beside any other column. Except for `chosen` with `rejected`, `score` does not call the
    parser: it finds the prompt of a row by the names in `data/columns.py`, or by the entry's
    `prompt`.
    """

    completions: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that a row of this form has."""
        return (*self.completions, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDataset:
    """One data set, or one format of files. Functions are paths within `treeward.data`, as
    `module.function`."""

    name: str
    """Its `dataset_name`, and the `task_name` of comparisons whose rows have none."""
    rows: tuple[str, ...]
    """What a row is, for docs/data.md: each is a line of its table."""
    parser: str
    """The function that makes a row a `Preference`, or of prompts a `Prompt`. It is called with the
    row's values, its place `where`, `options` and `arguments`, and of comparisons `task_name`. It
    returns None for a row without a comparison."""
    aliases: tuple[str, ...] = ()
    """Further names in configurations."""
    options: tuple[str, ...] = ()
    """Keys of the set's section of a configuration that the parser gets, unless they are null.
    `KEY_key` names the column KEY of `forms` anew."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the parser, where the configuration does not give them."""
    rating: str | None = None
    """For a set with one completion in each row: the column of its rating, unless `rating_key`
    names another. None: a row is a comparison."""
    prepare: str | None = None
    """A function of the file's rows and the open data set that gives the rows for the parser, where
    these are others: it joins rows, or leaves completions out."""
    forms: tuple[Form, ...] = ()
    """The keys that tell a row of this format. Empty: files are read so only by name."""
    condition: str | None = None
    """A function that says whether a row with these keys is of this format, where the keys do not
    tell."""
    prompt: str | None = None
    """For comparisons: the column of the prompt, where its name is none of those in
    `data/columns.py`. The parser finds it under `prompt`."""
    columns: tuple[str, ...] = ()
    """Columns that are read beside the completions, the prompt and those of every conversation. All
    others are named in the log."""
    needs_prompt_key: bool = False
    """Whether a row must have the column that `prompt_key` names. A set that finds its prompt by
    itself need not."""
    hub_path: str | None = None
    """Where the data is without a `data_path`."""
    hub_subset: str | None = None
    """The configuration name on the hub."""
    is_bundled: bool = False
    """Whether the data comes with treeward. It has no other path."""
    train_split: str = "train"
    """The split to train on, of a set that brings its own data."""
    validation_splits: Mapping[str, str] = field(default_factory=dict)
    """The split of each validation set, by the set's name, of a set that brings its own data."""
    held_out: float = 0.0
    """The share of its prompts that NeMo RL holds out where a file names no validation set."""
    validated_on: str | None = None
    """The data set that NeMo RL validates on where a file names no validation set."""

    @property
    def brings_data(self) -> bool:
        """Whether it needs no `data_path`."""
        return self.hub_path is not None or self.is_bundled


def _by_name(datasets: Iterable[KnownDataset]) -> dict[str, KnownDataset]:
    """The entries by their names and aliases."""
    names: dict[str, KnownDataset] = {}
    for dataset in datasets:
        for name in (dataset.name, *dataset.aliases):
            assert name not in names, f"two data sets are called {name}"
            names[name] = dataset
    return names


# As LMArena's conversation_a and conversation_b, or LLMBar's output_1 and output_2.
_SIDE_NAMES = ("conversation", "response", "completion", "output", "answer")
_SIDES = tuple(
    (f"{name}_{first}", f"{name}_{second}")
    for name, (first, second) in product(_SIDE_NAMES, (("a", "b"), ("1", "2"), ("0", "1")))
)
_WINNERS = ("winner", "label", "preference")

COMPARISONS: tuple[KnownDataset, ...] = (
    KnownDataset(
        name="HelpSteer3",
        rows=(
            "`context`, `response1`, `response2`, `overall_preference` from -3 to 3 (the second is "
            "much better); or `prompt`, `response_1`, `response_2`, `preference_strength`",
        ),
        parser="helpsteer.from_helpsteer3_row",
        aliases=("HelpSteer3Dataset",),
        forms=(
            Form(("response1", "response2"), ("overall_preference",)),
            Form(("response_1", "response_2"), ("preference_strength",)),
        ),
        columns=("context", "prompt", "overall_preference"),
        hub_path="nvidia/HelpSteer3",
        hub_subset="preference",
        validation_splits={"default": "validation"},
    ),
    KnownDataset(
        name="HelpSteer2",
        rows=("prompt, `response`, `helpfulness`, which ranks; a prompt's rows follow each other",),
        parser="ratings.from_ratings",
        options=("attributes",),
        rating="helpfulness",
        prepare="ratings.joined_by_prompt",
        forms=(Form(("response",), ("prompt", "helpfulness")),),
        columns=("completion", "answer"),
        needs_prompt_key=True,
        hub_path="nvidia/HelpSteer2",
        validation_splits={"default": "validation"},
    ),
    KnownDataset(
        name="GradedDataset",
        rows=(
            "prompt, `response` or `completion` (by name also `answer`), `score`, which ranks; a "
            "prompt's rows follow each other",
        ),
        parser="ratings.from_ratings",
        options=("attributes",),
        rating="score",
        prepare="ratings.joined_by_prompt",
        forms=(
            Form(("response",), ("prompt", "score")),
            Form(("completion",), ("prompt", "score")),
        ),
        columns=("answer",),
        needs_prompt_key=True,
    ),
    KnownDataset(
        name="HHTranscripts",
        rows=(r'`chosen`, `rejected` as `"\n\nHuman: ...\n\nAssistant: ..."`',),
        parser="transcripts.from_transcripts",
        aliases=("hh-rlhf",),
        forms=(Form(("chosen", "rejected")),),
        condition="transcripts.are_transcripts",
        hub_path="Anthropic/hh-rlhf",
        validation_splits={"default": "test"},
    ),
    KnownDataset(
        name="BinaryPreferenceDataset",
        rows=(
            "prompt, `chosen`, `rejected`",
            "`chosen`, `rejected`: whole conversations as messages, with the prompt in them or "
            "beside them (TRL, Tulu 3, UltraFeedback's binarized form); or two texts and no other "
            "text in the row",
        ),
        parser="pairs.from_binary_row",
        options=("chosen_key", "rejected_key"),
        forms=(Form(("chosen", "rejected")),),
        needs_prompt_key=True,
    ),
    KnownDataset(
        name="UltraFeedback",
        rows=("`instruction`, `completions` with an `overall_score` each, which ranks them",),
        parser="ratings.from_ratings",
        options=("attributes", "rating_key"),
        # About 2,000 of its grades are mistyped: the function has the source.
        prepare="ratings.without_mistyped",
        forms=(Form(("completions",), ("instruction",)),),
        columns=("responses", "scores"),
        hub_path="openbmb/UltraFeedback",
    ),
    KnownDataset(
        name="PreferenceDataset",
        rows=(
            "prompt, `completions` or `responses` (texts, messages, or objects with a `completion` "
            "or `response`); they are ranked by the `rank` of each (lower is better), else by its "
            "`score` or the row's list `scores`",
            "`completions` that are whole conversations, alone or beside their prompt",
        ),
        parser="preference.preference_from_dict",
        options=("attributes", "rating_key"),
        forms=(Form(("completions",)), Form(("responses",))),
        columns=("scores",),
    ),
    KnownDataset(
        name="WinnerDataset",
        rows=(
            "`output_1`, `output_2` (or `_a`, `_b`; also `response_`, `completion_`, `answer_`, "
            "`conversation_`) and `winner`, `label` or `preference`: `1`, `a`, `model_a`, the "
            "column's or the model's name, or `tie` (LLMBar, LMArena)",
        ),
        parser="winners.from_winner_row",
        forms=tuple(Form(sides, (winner,)) for sides, winner in product(_SIDES, _WINNERS)),
        columns=(*_WINNERS, "model_a", "model_b"),
        needs_prompt_key=True,
    ),
    KnownDataset(
        name="Tulu3Preference",
        rows=("`chosen`, `rejected`: whole conversations; `prompt` repeats a part of them",),
        parser="pairs.from_conversations_row",
        aliases=("Tulu3PreferenceDataset",),
        columns=("prompt", "chosen", "rejected"),
        hub_path="allenai/llama-3.1-tulu-3-8b-preference-mixture",
    ),
    KnownDataset(
        name="Bundled",
        rows=("the rank format, generated",),
        parser="preference.preference_from_dict",
        options=("attributes", "rating_key"),
        columns=("completions", "responses", "scores"),
        is_bundled=True,
        validation_splits={"plain": "validation", "length_controlled": "length_controlled"},
    ),
)
"""The sets of comparisons. The first with a form that a row has reads it, so a set comes after
those whose rows have its keys and more."""

COMPARISON_SETS: Mapping[str, KnownDataset] = _by_name(COMPARISONS)
"""The sets of comparisons, by name and alias."""

STEP_FORMATS: tuple[KnownDataset, ...] = (
    KnownDataset(
        name="PRM800K",
        rows=(
            "`question.problem`, and `label.steps` with the rated `completions` of each step "
            "(OpenAI)",
        ),
        parser="step_rows.from_prm800k_row",
        options=("neutral_is_right",),
        forms=(Form(("label",), ("question",)),),
        condition="step_rows.has_question_with_problem",
    ),
    KnownDataset(
        name="ProcessBench",
        rows=("`problem`, `steps`, `label`: the index of the first wrong step, or -1",),
        parser="step_rows.from_process_bench_row",
        forms=(Form(("steps",), ("problem", "label")),),
    ),
    KnownDataset(
        name="StepDataset",
        rows=(
            "prompt, `completions`, which are the steps of one solution, and `labels`, one for "
            "each: true or false, or a probability (TRL)",
        ),
        parser="step_rows.from_step_row",
        forms=(Form(("completions",), ("labels",)),),
    ),
    KnownDataset(
        name="MathShepherd",
        rows=("`input` with a mark after each step, `label`: the same text with `+` or `-`",),
        parser="step_rows.from_math_shepherd_row",
        options=("placeholder_token",),
        forms=(Form(("input",), ("label",)),),
        condition="step_rows.has_label_text",
    ),
    KnownDataset(
        name="PlaceholderSteps",
        rows=("`input` with a placeholder after each step, `label` or `value`: a list (OpenRLHF)",),
        parser="step_rows.from_placeholder_row",
        options=("placeholder_token",),
        # OpenRLHF's own example reads `value`.
        forms=(Form(("input",), ("label",)), Form(("input",), ("value",))),
    ),
    KnownDataset(
        name="SignedTurns",
        rows=(
            "`conversations` or `messages`: a step in each turn of the user, `+` or `-` in each of "
            "the assistant (RLHFlow)",
        ),
        parser="step_rows.from_signed_turns",
        forms=(Form(("conversations",)), Form(("messages",))),
        condition="step_rows.are_signed_turns",
    ),
)
"""The forms of solutions with labels of their steps, which a process reward model learns. The first
with a form that a row has reads it."""

STEP_SETS: Mapping[str, KnownDataset] = _by_name(STEP_FORMATS)
"""The forms of steps, by name and alias."""

_MATH_PROBLEM = ("`problem`, `answer`",)
_VERL = ("verl's rows",)

PROMPTS: tuple[KnownDataset, ...] = (
    KnownDataset(
        name="ResponseDataset",
        rows=(
            "`input` (text or messages) and `output`, the correct answer; `input_key` and "
            "`output_key` rename them (NeMo RL)",
        ),
        parser="prompt_sets.from_response_row",
        options=("input_key", "output_key"),
    ),
    KnownDataset(
        name="PromptDataset",
        rows=(
            "one of `messages`, `prompt` (TRL, verl), `context` (the rank format), "
            "`responses_create_params` (NeMo Gym); `input_key` names another",
        ),
        parser="prompt_sets.from_prompt_row",
        aliases=("auto",),
        options=("input_key", "output_key"),
    ),
    KnownDataset(
        name="OpenMathInstruct-2",
        rows=("`problem`, `expected_answer`; problems come repeatedly",),
        parser="prompt_sets.from_response_row",
        aliases=("OpenMathInstruct2",),
        options=("input_key", "output_key"),
        arguments={"input_key": "problem", "output_key": "expected_answer", "keeps_columns": False},
        hub_path="nvidia/OpenMathInstruct-2",
        train_split="train_1M",
        held_out=0.05,
    ),
    KnownDataset(
        name="DeepScaler",
        rows=_MATH_PROBLEM,
        parser="prompt_sets.from_response_row",
        options=("input_key", "output_key"),
        arguments={"input_key": "problem", "output_key": "answer", "keeps_columns": False},
        hub_path="agentica-org/DeepScaleR-Preview-Dataset",
        validated_on="AIME2024",
    ),
    KnownDataset(
        name="AIME2024",
        rows=_MATH_PROBLEM,
        parser="prompt_sets.from_response_row",
        options=("input_key", "output_key"),
        arguments={"input_key": "problem", "output_key": "answer", "keeps_columns": False},
        hub_path="HuggingFaceH4/aime_2024",
        validation_splits={"default": "train"},
    ),
    KnownDataset(
        name="DAPOMath17K",
        rows=_VERL,
        parser="prompt_sets.from_prompt_row",
        options=("input_key", "output_key"),
        hub_path="BytedTsinghua-SIA/DAPO-Math-17k",
        validation_splits={"default": "train"},
    ),
    KnownDataset(
        name="DAPOMathAIME2024",
        rows=_VERL,
        parser="prompt_sets.from_prompt_row",
        options=("input_key", "output_key"),
        hub_path="BytedTsinghua-SIA/AIME-2024",
        validation_splits={"default": "train"},
    ),
    KnownDataset(
        name="Bundled",
        rows=("the different prompts of the generated data",),
        parser="prompt_sets.from_prompt_row",
        prepare="prompt_sets.different_prompts",
        is_bundled=True,
        validation_splits={"default": "validation"},
    ),
)
"""The sets of prompts."""

PROMPT_SETS: Mapping[str, KnownDataset] = _by_name(PROMPTS)
"""The sets of prompts, by name and alias."""
