"""Every column of a row is read, refused, or named."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import assistant, user
from templates import family_renderer

from treeward import Conversation
from treeward.config.data import DatasetConfig
from treeward.data.columns import named_columns, prompt_column, with_own_prompt
from treeward.data.conversation import check_messages
from treeward.data.datasets import open_dataset
from treeward.data.formats import conversations_of
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.data.sources import Row, read_rows
from treeward.errors import DataError
from treeward.scoring.rows import chunks_of

Parse = Callable[..., Preference]
Write = Callable[..., Path]
SIDES = {"chosen": "4", "rejected": "5"}
ASK = [user("2 + 2?")]


@pytest.mark.parametrize(
    "column",
    ["messages", "conversation", "conversations", "input", "history"],
)
def test_messages_are_a_prompt_by_any_name(parse: Parse, column: str) -> None:
    row = {column: ASK, **SIDES}
    assert list(parse("auto", row).context) == ASK
    assert conversations_of(row, "x:1") == [[*ASK, assistant("4")], [*ASK, assistant("5")]]


def test_the_same_prompt_under_two_names_is_one(parse: Parse) -> None:
    """distilabel writes `instruction` and `prompt`; with another text in one it is an error."""
    row = {"instruction": "2 + 2?", "prompt": "2 + 2?", **SIDES}
    assert parse("auto", row).context == tuple(ASK)
    assert conversations_of(row, "x:1") == [[*ASK, assistant("4")], [*ASK, assistant("5")]]
    with pytest.raises(DataError, match="two prompts"):
        parse("auto", row | {"instruction": "3 + 3?"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "2 + 2?", "context": "Add.", **SIDES}, "two prompts"),
        ({"prompt": "2 + 2?", "input": "Add.", **SIDES}, "input would be lost"),
        ({"prompt": "2 + 2?", "history": ASK, **SIDES}, "history would be lost"),
        ({"prompt": "2 + 2?", "images": ["a.png"], **SIDES}, "images would be lost"),
        (
            {"prompt": [{"role": "system", "content": "A"}, *ASK], "system": "B", **SIDES},
            "another system message",
        ),
        (
            {"prompt": "[{'role': 'user', 'content': 'Hi'}]", **SIDES},
            r"Python's text(.|\n)*json\.dumps",
        ),
        ({"frage": "2 + 2?", **SIDES}, r"no prompt(.|\n)*prompt_key=frage"),
        ({"prompt": "2 + 2?", "tools": [3], **SIDES}, "a tool is not an object"),
        (
            {"prompt": "2 + 2?", "chat_template_kwargs": "sad", **SIDES},
            "chat_template_kwargs is not an object",
        ),
    ],
)
def test_what_could_be_lost_is_refused_in_training_and_in_scoring(
    parse: Parse,
    row: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(DataError, match=words):
        parse("auto", row)
    with pytest.raises(DataError, match=words):
        conversations_of(row, "x:1")


def test_completions_are_not_scored_without_their_question() -> None:
    with pytest.raises(DataError, match=r"no prompt(.|\n)*prompt_key=frage"):
        conversations_of({"frage": "2 + 2?", "responses": ["4", "5"]}, "x:1")


def test_one_line_names_what_is_not_read(
    write_rows: Write,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    row = {
        "prompt": "2 + 2?",
        **SIDES,
        "margin": "0.5",
        "source": "web",
        "tags": ["a"],
        "seed": 3,
        "note": "",
    }
    path = str(write_rows("rows.jsonl", [row, row]))
    list(open_dataset(DatasetConfig(data_path=path)))
    assert caplog.text.count("no conversation has these columns: source, tags") == 1
    caplog.clear()
    list(chunks_of(read_rows(path)))
    assert caplog.text.count("not read, and written as they are: source, tags.") == 1


@pytest.mark.parametrize(
    ("chosen_key", "rejected_key", "chosen", "rejected"),
    [
        ("edited", "chosen", "Four.", "It is 4."),
        ("rejected", "chosen", "It is 5.", "It is 4."),
        ("history", "rejected", "IV.", "It is 5."),
    ],
)
def test_a_named_completion_may_have_the_usual_name_of_another_column(
    chosen_key: str,
    rejected_key: str,
    chosen: str,
    rejected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`score` lost the data's own `chosen`, and ended with a KeyError at a prompt's name."""
    row = {"question": "2 + 2?", "edited": "Four.", "history": "IV."}
    row |= {"chosen": "It is 4.", "rejected": "It is 5."}
    config = DatasetConfig(
        data_path="rows.jsonl",
        prompt_key="question",
        chosen_key=chosen_key,
        rejected_key=rejected_key,
    )
    named = named_columns(row, config, "rows.jsonl:1")
    want = [[*ASK, assistant(chosen)], [*ASK, assistant(rejected)]]
    assert conversations_of(named, "rows.jsonl:1") == want
    caplog.set_level(logging.INFO)
    list(chunks_of([Row(row, "rows.jsonl:1")], config))
    [told] = caplog.messages
    unread = set(told.partition(": ")[2].removesuffix(".").split(", "))
    assert unread == set(row) - {"question", chosen_key, rejected_key}


def test_training_reads_a_named_completion_that_has_the_usual_name_of_a_prompt(
    write_rows: Write,
) -> None:
    """The row had no `messages`, said the error, as naming the prompt had taken them out."""
    row = {"question": "2 + 2?", "messages": [assistant("4.")], "other": [assistant("5.")]}
    config = DatasetConfig(
        data_path=str(write_rows("rows.jsonl", [row])),
        prompt_key="question",
        chosen_key="messages",
        rejected_key="other",
    )
    [(preference, _)] = open_dataset(config)
    conversations = [preference.conversation(side) for side in preference.completions]
    assert [list(turns) for turns in conversations] == [
        [*ASK, assistant("4.")],
        [*ASK, assistant("5.")],
    ]


def test_a_format_may_have_its_prompt_under_a_name_that_is_a_part_of_prompts_elsewhere() -> None:
    """As text under `history` it was read, and then refused as a part that would be lost."""
    row = with_own_prompt({"history": "2 + 2?", "score": 1}, "history", "rows.jsonl:1")
    assert row == {"prompt": "2 + 2?", "score": 1}
    assert prompt_column(row, "rows.jsonl:1") == "prompt"


def test_what_a_named_column_replaces_is_named_too(
    write_rows: Write,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    row = {"prompt": "Old.", "frage": "2 + 2?", "history": ASK, **SIDES}
    path = str(write_rows("rows.jsonl", [row]))
    config = DatasetConfig(data_path=path, prompt_key="frage")
    ((preference, _),) = open_dataset(config)
    assert list(preference.context) == ASK
    assert "no conversation has these columns: prompt, history" in caplog.text
    (chunk,) = chunks_of(read_rows(path), config)
    assert chunk.requests[0].conversations == preference.conversations
    assert "not read, and written as they are: prompt, history." in caplog.text


def test_a_set_without_a_prompt_is_a_warning(
    write_rows: Write,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = str(write_rows("rows.jsonl", [SIDES, SIDES | {"chosen": "6"}]))
    list(open_dataset(DatasetConfig(data_path=path)))
    assert caplog.text.count("the rows have no prompt (columns: chosen, rejected)") == 1


LLMBAR = {"input": "2 + 2?", "output_1": "4", "output_2": "5"}
ARENA = {
    "model_a": "one",
    "model_b": "two",
    "conversation_a": [*ASK, assistant("4")],
    "conversation_b": [*ASK, assistant("5")],
}


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        (LLMBAR | {"label": 1}, (0, 1)),
        (LLMBAR | {"label": "2"}, (1, 0)),
        (ARENA | {"winner": "model_a"}, (0, 1)),
        (ARENA | {"winner": "two"}, (1, 0)),
        (ARENA | {"winner": "tie (bothbad)"}, (0, 0)),
        ({"prompt": "2 + 2?", "response_a": "4", "response_b": "5", "winner": "B"}, (1, 0)),
    ],
)
def test_the_winner_may_have_a_column(
    parse: Parse,
    row: dict[str, Any],
    ranks: tuple[int, int],
) -> None:
    preference = parse("auto", row)
    assert preference.ranks == ranks and list(preference.context) == ASK
    assert (
        preference.conversations
        == conversations_of(row, "x:1")
        == [[*ASK, assistant("4")], [*ASK, assistant("5")]]
    )


def test_a_winner_that_names_no_side_is_an_error(parse: Parse) -> None:
    with pytest.raises(DataError, match=r"none of the two sides(.|\n)*1 or 2"):
        parse("auto", LLMBAR | {"label": 3})
    models = {"model_1": "m", "model_2": "m"}
    with pytest.raises(DataError, match="label names both sides"):
        parse("auto", LLMBAR | models | {"label": "m"})
    assert parse("auto", LLMBAR | models | {"label": 2}).ranks == (1, 0)


def test_ratings_have_a_column_of_any_name(write_rows: Write) -> None:
    rows = [
        {"question": "2 + 2?", "answer": text, "stars": stars}
        for text, stars in (("5", 1), ("4", 4.5))
    ]
    path = str(write_rows("rows.jsonl", rows))
    with pytest.raises(DataError, match="rating_key=rating"):
        list(open_dataset(DatasetConfig(data_path=path)))
    ((preference, _),) = open_dataset(DatasetConfig(data_path=path, rating_key="stars"))
    assert preference.ranks == (1, 0) and [one.score for one in preference.completions] == [1, 4.5]
    listed = str(
        write_rows(
            "listed.jsonl",
            [{"prompt": "2 + 2?", "responses": ["5", "4"], "stars": [1, 2]}],
        ),
    )
    ((preference, _),) = open_dataset(DatasetConfig(data_path=listed, rating_key="stars"))
    assert preference.ranks == (1, 0)


def test_rated_rows_of_one_prompt_and_other_tools_are_other_prompts(write_rows: Write) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = []
    for extra in ({}, {"tools": tools}):
        for text, stars in (("5", 1), ("4", 2)):
            rows.append({"prompt": "2 + 2?", "response": text, "stars": stars, **extra})
    path = str(write_rows("rows.jsonl", rows))
    stream = open_dataset(DatasetConfig(data_path=path, rating_key="stars"))
    (without, _), (with_tools, _) = stream
    assert dict(without.template_kwargs) == {}
    assert dict(with_tools.template_kwargs) == {"tools": tools}


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        (
            [
                {"question": "2 + 2?", "answer": "5", "stars": 1},
                {"question": "2 + 2?", "stars": 2},
                {"question": "2 + 2?", "answer": "4", "stars": 3},
            ],
            {"rating_key": "stars"},
            "the row has no response",
        ),
        (
            [
                {"question": "2 + 2?", "answer": "5", "stars": 1},
                {"question": "2 + 2?", "answer": "4"},
            ],
            {"rating_key": "stars"},
            "the row has no stars",
        ),
        (
            [
                {
                    "instruction": "2 + 2?",
                    "completions": [
                        {"response": "4", "overall_score": 9},
                        {"response": "5", "overall_score": 3},
                    ],
                },
                {"instruction": "3 + 3?", "completions": "[{"},
            ],
            {},
            "completions is not valid JSON",
        ),
        (
            [
                {"input": "2 + 2?", "output_1": "4", "output_2": "5", "label": 1},
                {"task": "3 + 3?", "output_1": "6", "output_2": "7", "label": 1},
            ],
            {},
            "the row has no prompt(.|\n)*prompt_key=task",
        ),
    ],
    ids=["ratings", "no rating", "ultrafeedback", "winners"],
)
def test_no_broken_row_is_left_out(
    rows: list[Any], options: dict[str, Any], problem: str, write_rows: Write
) -> None:
    path = str(write_rows("rows.jsonl", rows))
    with pytest.raises(DataError, match=problem) as raised:
        list(open_dataset(DatasetConfig(data_path=path, **options)))
    assert raised.value.where == f"{path}:2"


@pytest.mark.parametrize(
    "prompt",
    [
        "\n\nHuman: 1 + 1?\n\nAssistant: 2.\n\nHuman: 2 + 2?\n\nAssistant: ",
        "1 + 1?\n<extra_id_1>Assistant\n2.\n<extra_id_1>User\n2 + 2?",
    ],
)
def test_a_prompt_that_marks_its_turns(parse: Parse, prompt: str) -> None:
    """As in Dahoas/rm-static, whose sides are completions alone, and in HelpSteer2."""
    turns = [user("1 + 1?"), assistant("2."), user("2 + 2?")]
    preference = parse("auto", {"prompt": prompt, "chosen": "4.", "rejected": "5."})
    assert list(preference.context) == turns
    (conversation,) = conversations_of({"prompt": prompt, "response": "4."}, "rows.jsonl:1")
    assert list(conversation) == [*turns, assistant("4.")]


@pytest.mark.parametrize(
    "prompt", ["\n\nHuman: Who?", "Go on: Human: a\n\nAssistant:", "Assistant:"]
)
def test_a_text_that_only_quotes_turns_is_one_message(parse: Parse, prompt: str) -> None:
    preference = parse("auto", {"prompt": prompt, "chosen": "4.", "rejected": "5."})
    assert list(preference.context) == [user(prompt)]


@pytest.mark.parametrize("key", ["probability", "win_probability", "stars"])
def test_a_rating_is_learnt_as_it_is(write_rows: Write, key: str) -> None:
    ratings = (0.25, 0.75)
    in_objects = [
        {"response": text, key: rating} for text, rating in zip("ab", ratings, strict=True)
    ]
    files = {
        "objects": [{"prompt": "2 + 2?", "responses": in_objects}],
        "rows": [{"prompt": "2 + 2?", **item} for item in in_objects],
    }
    if key != "probability":  # of a whole row it is that of `chosen`
        files["list"] = [{"prompt": "2 + 2?", "responses": ["a", "b"], key: ratings}]
    for name, rows in files.items():
        path = str(write_rows(f"{name}.jsonl", rows))
        ((preference, _),) = open_dataset(DatasetConfig(data_path=path, rating_key=key))
        assert tuple(one.score for one in preference.completions) == ratings, name
        assert preference.ranks == (1, 0)


def test_a_column_rank_beside_a_rating_does_not_rank(write_rows: Write) -> None:
    """It may be the place in a search, or count from the worst."""
    rows = [
        {"prompt": "2 + 2?", "response": "5", "score": 1, "rank": 1},
        {"prompt": "2 + 2?", "response": "4", "score": 5, "rank": 2},
    ]
    path = str(write_rows("rows.jsonl", rows))
    ((preference, _),) = open_dataset(DatasetConfig(data_path=path))
    assert preference.ranks == (1, 0)


@pytest.mark.parametrize("arguments", ["", "null", None, "{}", {}])
def test_no_arguments_have_one_form(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}], "messages", None)
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_openais_older_calls_have_one_form() -> None:
    call = {"name": "now", "arguments": '{"city": "Rome"}'}
    older = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "now", "content": "12:00"},
    ]
    newer = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "now", "content": "12:00"},
    ]
    assert check_messages(older, "messages", None) == check_messages(newer, "messages", None)


def test_text_that_is_no_object_stays() -> None:
    """A policy may have written it."""
    call = {"type": "function", "function": {"name": "now", "arguments": '{"city": "Ro'}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}], "messages", None)
    assert message["tool_calls"] == [call]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "deepseekv3", "glm4moe", "llama3_1"])
def test_arguments_render_alike_as_an_object_and_as_text(family: str) -> None:
    renderer = family_renderer(family)
    texts = []
    for arguments in ({"city": "Rome"}, '{"city": "Rome"}'):
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "rain", "arguments": arguments},
        }
        texts.append(
            renderer.render([*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]),
        )
    assert (
        texts[0] == texts[1]
        and "Rome" in texts[0]
        and '\\"' not in texts[0]
        and "'city'" not in texts[0]
    )


def test_a_template_that_ignores_tools_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    renderer = family_renderer("gemma")
    tool = {"type": "function", "function": {"name": "now"}}
    for _ in range(2):
        renderer.render(Conversation([*ASK, assistant("4")], tools=[tool]), where="row 7")
    assert caplog.text.count("row 7: the chat template ignores tools") == 1


def test_of_several_templates_the_one_that_reads_tools_is_named(
    caplog: pytest.LogCaptureFixture,
    tiny_tokenizer: Any,
) -> None:
    tokenizer = copy.copy(tiny_tokenizer)
    words = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.chat_template = {"default": words, "tool_use": "{{ tools | tojson }}" + words}
    conversation = Conversation([*ASK, assistant("4")], tools=[{"type": "function"}])
    assert "function" not in Renderer(tokenizer).render(conversation)
    assert "reads it: policy.tokenizer.chat_template=tool_use" in caplog.text
    assert "function" in Renderer(tokenizer, chat_template="tool_use").render(conversation)
