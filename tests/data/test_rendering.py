"""Rendering: real chat templates over locally trained tokenizers, one BOS, and truncation that
spares the answers."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import assistant, user
from templates import (
    CASES,
    CHATML,
    SENTENCES,
    TEMPLATES,
    byte_bpe,
    family_renderer,
    template_source,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from treeward.data import template_bounds
from treeward.data.chat_template import DEFAULT_CHAT_TEMPLATE
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, TreewardError

# LLaVA writes a space after `</s>`, GLM-4 writes no end of turn.
LAST_OTHER = {"llava_next", "llava_next_training", "glm4moe", "glm4moe_training"}
NEWLINE_LAST = ("gemma", "diffusion_gemma", "qwen", "nemotron", "lfm2", "smolvlm", "idefics3")
LLAMA2_TEMPLATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m['content'] "
    "}}{% endfor %}"
)


CHAT = [
    user("What is the capital of France?"),
    assistant("Paris."),
    user("And of Ünïland?"),
    assistant("数字 🙂, then?"),
]


def bert_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
    )


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
@pytest.mark.parametrize("name", CASES)
def test_real_templates(name: str) -> None:
    """One BOS, shared prefixes, the end of turn that is known; and the ids are those of plain
    transformers."""
    renderer = family_renderer(name)
    tokenizer = renderer.tokenizer
    bos = tokenizer.bos_token_id
    context = CHAT[:3]
    answers = ("Paris it is.", "Sorry, that I do not know.")
    rows = renderer.encode_many([[*context, assistant(answer)] for answer in answers])
    kind = "eos"
    if name in LAST_OTHER:
        kind = "other"
    elif name.startswith(NEWLINE_LAST):
        kind = "newline"
    for row, answer in zip(rows, answers, strict=True):
        assert not renderer.adds_bos or row[0] == bos
        if bos is not None and tokenizer.bos_token != "<|im_start|>":
            assert row.count(bos) == int(row[0] == bos)
        text = tokenizer.decode(row)
        assert answer in text and all(message["content"] in text for message in context)
    assert renderer.read_token == kind
    shared = len(os.path.commonprefix(rows))
    # they part where the answers do
    assert tokenizer.decode(rows[0][shared:]).lstrip().startswith("Paris it")
    assert context[-1]["content"] in tokenizer.decode(rows[0][:shared])
    source = template_source(name)
    if "strftime_now" not in source:
        in_parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
        messages = in_parts if name.startswith(("idefics3", "llava_next", "smolvlm")) else CHAT
        plain = tokenizer.apply_chat_template(messages, chat_template=source, return_dict=False)
        assert (
            renderer.encode(CHAT)
            == ([bos] if renderer.adds_bos and plain[0] != bos else []) + plain
        )


EMPTY = "<think>\n\n</think>\n\n"
OPENINGS = [
    ("deepseek_r1_distill", {}, "<think>\n"),
    ("deepseekv3", {}, "<think>\n"),
    ("glm4moe", {}, ""),
    ("glm4moe", {"enable_thinking": False}, "<think></think>"),
    ("nemotron_3_nano", {}, "<think>\n"),
    ("nemotron_3_nano", {"enable_thinking": False}, "<think></think>"),
    ("qwen3", {}, ""),
    ("qwen3", {"enable_thinking": False}, EMPTY),
    ("qwen3_5_think", {}, "<think>\n"),
    ("qwen3_5_think", {"enable_thinking": False}, EMPTY),
    ("qwen3_6", {}, "<think>\n"),
    ("qwen3_8", {}, "<think>\n"),
    ("qwen3_8", {"enable_thinking": False}, EMPTY),
    *(
        (name, {}, "")
        for name in ("cohere2", "gemma3", "gptoss", "llama3", "phi3", "qwen3_instruct_2507")
    ),
]


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
@pytest.mark.parametrize(("name", "variables", "opening"), OPENINGS)
def test_what_a_generation_prompt_writes_of_the_completion(
    name: str,
    variables: Any,
    opening: str,
) -> None:
    """A model of the same family reads a completion with its opening as the policy's context had
    it, once."""
    renderer = family_renderer(name)
    renderer.chat_template_kwargs = variables
    assert renderer.opening(CHAT[:3]) == renderer.opening([user("<think> is a tag.")]) == opening
    sampled = "Ratio.\n</think>\n\nRomam." if opening == "<think>\n" else "Romam."
    text = renderer.render([*CHAT[:1], assistant(opening + sampled)])
    parts = [{"type": "text", "text": opening}, {"type": "text", "text": sampled}]
    assert renderer.render([*CHAT[:1], assistant(parts)]) == text
    if name.startswith("deepseek"):  # they leave reasoning out of what was written before
        assert "<think>" not in text and "Romam." in text
    elif opening:
        assert text.count("<think>") == 1
        assert text.startswith(renderer.render(CHAT[:1], generation_prompt=True).rstrip())


def test_a_generation_prompt_may_open_a_completion_with_any_text() -> None:
    prompting = (
        CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n" + "OPENING{% endif %}"
    )
    openings = {
        "": "",
        " ": "",  # white space alone is layout
        "Sure: ": "Sure: ",
        "<seed:think>": "<seed:think>",
        "<|im_end|>": "",  # special tokens are in no text of a completion
    }
    for written, opening in openings.items():
        template = prompting.replace("OPENING", "{{ '" + written + "' }}")
        assert Renderer(byte_bpe(), chat_template=template).opening(CHAT[:3]) == opening
    closed = CHATML.replace("'\\n' +", "'\\n' + ('</think>' if m['role'] == 'assistant' else '') +")
    for written, opening in (("<think>", "<think>"), ("</think>", "")):  # as DeepSeek-V3.1
        ending = (
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n"
            + written
            + "' }}{% endif %}"
        )
        assert Renderer(byte_bpe(), chat_template=closed + ending).opening(CHAT[:3]) == opening


def test_bos_is_added_once_and_doubles_collapse() -> None:
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), "<s>", "<|im_end|>", True)
    for written in (0, 1, 2, 3):
        ids = Renderer(tokenizer, chat_template="<s>" * written + CHATML).encode(CHAT)
        assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_model_may_have_another_number_of_bos(number: int) -> None:
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), "<s>", "<|im_end|>", True)
    renderer = Renderer(tokenizer, chat_template=CHATML, num_bos=number)
    ids = renderer.encode(CHAT)
    bos = tokenizer.bos_token_id
    assert ids[:number] == [bos] * number == [token for token in ids if token == bos]
    assert (
        tokenizer.apply_chat_template(CHAT, chat_template=renderer.chat_template, return_dict=False)
        == ids
    )
    # a client's text, with others
    assert renderer.encode_texts(["<s><s><s>" + renderer.render(CHAT)]) == [
        ids,
    ]
    cut = Renderer(
        tokenizer,
        chat_template=CHATML,
        num_bos=number,
        max_length=len(ids) - 2,
        truncation="truncate_left",
    )
    fitted = cut.fit([user("A"), assistant("B"), *CHAT])
    assert fitted is not None and fitted.truncated and fitted.token_ids.count(bos) == number
    assert Renderer(tokenizer, chat_template="<s>" * 3 + CHATML, num_bos=number).encode(CHAT) == ids
    with pytest.raises(ConfigError, match="there is no BOS"):
        Renderer(bert_tokenizer(), num_bos=number)


def test_encoder_is_framed_once() -> None:
    tokenizer = bert_tokenizer()
    for template in (None, "[CLS]{{ messages[0]['content'] }} {{ messages[-1]['content'] }}[SEP]"):
        renderer = Renderer(tokenizer, chat_template=template)
        ids = renderer.encode([user("What is the capital?"), assistant("Paris")])
        assert renderer.kind == "encoder"
        assert (ids[0], ids[-1], ids.count(2), ids.count(3)) == (2, 3, 1, 1)


def test_default_template_ends_at_eos(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_bpe((), None, "</s>", False)
    with caplog.at_level(logging.WARNING):
        renderer = Renderer(tokenizer)
    assert sum("no chat template" in record.message for record in caplog.records) == 1
    text = renderer.render([{"role": "system", "content": "Be brief."}, *CHAT[:2]])
    assert text == (
        "<|system|>\nBe brief.\n<|user|>\nWhat is the capital of France?\n<|assistant|>\nParis.</s>"
    )
    assert renderer.read_token == "eos"
    without_eos = Renderer(byte_bpe((), None, None, False))
    assert without_eos.render(CHAT[:2]).endswith("<|assistant|>\nParis.")


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    tokenizer = pickle.loads(pickle.dumps(byte_bpe()))
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML, encoding="utf-8")
    from_file, from_text = (
        Renderer(tokenizer, chat_template=given) for given in (str(path), CHATML)
    )
    assert from_file.encode(CHAT) == from_text.encode(CHAT)
    assert Renderer(tokenizer, chat_template="default").chat_template == DEFAULT_CHAT_TEMPLATE
    tokenizer.chat_template = {
        "default": CHATML,
        "shout": CHATML.replace("m['content']", "m['content'] | upper"),
    }
    assert Renderer(tokenizer, chat_template="default").render(CHAT) == from_text.render(CHAT)
    assert "PARIS" in Renderer(tokenizer, chat_template="shout").render(CHAT)
    with pytest.raises(ConfigError, match=r"neither a file nor a template(?s:.*)missing\.jinja"):
        Renderer(tokenizer, chat_template="missing.jinja")
    with pytest.raises(
        ConfigError,
        match=r"argument of transformers(?s:.*)add_generation_prompt, tokenize",
    ):
        Renderer(
            tokenizer,
            chat_template_kwargs={"tools": [], "tokenize": True, "add_generation_prompt": True},
        )
    with pytest.raises(ConfigError, match=r"cannot be parsed(?s:.*)\{% if %\}"):
        Renderer(tokenizer, chat_template="hello\n{% if %}")


def test_a_refused_conversation_names_row_roles_and_reason() -> None:
    renderer = Renderer(byte_bpe(), chat_template=LLAMA2_TEMPLATE)
    with pytest.raises(DataError) as caught:
        renderer.encode([user("Hello"), user("Again"), assistant("Yes?")], where="train.jsonl:17")
    message = str(caught.value)
    assert message.startswith(
        "train.jsonl:17: the chat template refused the conversation: roles must alternate",
    )
    assert "user > user > assistant" in message and "policy.tokenizer.chat_template" in message
    with pytest.raises(DataError, match="b.jsonl:2"):
        renderer.encode_many([CHAT, [assistant("Hm.")]], where=["b.jsonl:1", "b.jsonl:2"])
    with pytest.raises(DataError, match="no messages"):
        renderer.encode([])


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "smolvlm", "glm4moe", "qwen2_5"])
@pytest.mark.parametrize("part", ["Two?", {"text": "Two?"}, {"type": "input_text", "text": "Two?"}])
def test_parts_of_text_have_one_form(family: str, part: Any) -> None:
    """Templates that read parts left out the text of other forms."""
    renderer = family_renderer(family)
    usual = [user([{"type": "text", "text": "Two?"}]), assistant("Four.")]
    assert renderer.render([user([part]), assistant("Four.")]) == renderer.render(usual)
    assert "Two?" in renderer.render(usual)


@pytest.mark.parametrize("family", ["deepseekv3", "llama3_1", "lfm2_2_5", "gptoss", "qwen3"])
@pytest.mark.parametrize(
    "empty", [{"tool_calls": []}, {"reasoning_content": ""}, {"function_call": {}, "name": ""}]
)
def test_a_key_that_is_empty_says_nothing(family: str, empty: dict[str, Any]) -> None:
    """DeepSeek-V3's template left out the text of a message with an empty list of calls."""
    renderer = family_renderer(family)
    plain = [user("Two and two?"), assistant("Four.")]
    assert renderer.render([plain[0], plain[1] | empty]) == renderer.render(plain)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_think", "smolvlm"])
def test_a_text_part_with_an_image_of_null_is_text(family: str) -> None:
    """As LMArena's messages have it, and any table of Arrow that was written as JSON."""
    renderer = family_renderer(family)
    parts = [{"type": "text", "text": "Two and two?"}]
    nulls = [parts[0] | {"image": None, "image_url": None}]
    plain, with_nulls = ([user(content), assistant("Four.")] for content in (parts, nulls))
    assert renderer.render(with_nulls) == renderer.render(plain)
    assert "Two and two?" in renderer.render(with_nulls)


def test_content_parts() -> None:
    parts = [
        user([{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]),
        assistant("Wait."),
    ]
    plain = [user("What now?"), assistant("Wait.")]
    listing = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}|{% endfor %}"
    )
    text_only, vision = (
        Renderer(byte_bpe(), chat_template=template) for template in (CHATML, listing)
    )
    assert text_only.render(parts) == text_only.render(plain)
    assert vision.render(parts) == vision.render(plain) == "What now?|Wait.|"
    trimming = "{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}"
    both = f"{{% for m in messages %}}{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}{trimming}"
    # as Gemma 3: its own way with parts is that of plain transformers
    both += "{% endif %}{% endfor %}"
    assert Renderer(byte_bpe(), chat_template=both).render(parts) == "Whatnow?Wait."
    with pytest.raises(DataError, match=r"reads text only(?s:.*)image"):
        text_only.encode([user([{"type": "image", "url": "a.png"}])], where="a.jsonl:1")


SYSTEM = {"role": "system", "content": "Be brief."}
LONG = [
    SYSTEM,
    user("first " * 30),
    assistant("second " * 30),
    user("What is the capital of France?"),
]
ANSWERS = [[assistant("Paris is the capital.")], [assistant("Paris is not what I know.")]]


def fitting(
    max_length: int,
    truncation: Any,
    template: str = CHATML,
    adds_bos: bool = True,
) -> Renderer:
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), "<s>", "<|im_end|>", adds_bos)
    return Renderer(tokenizer, chat_template=template, max_length=max_length, truncation=truncation)


def fit_all(
    renderer: Renderer,
    context: list[Any],
    answers: list[list[Any]],
) -> list[list[int] | None]:
    fitted = [renderer.fit([*context, *answer]) for answer in answers]
    return [None if one is None else one.token_ids for one in fitted]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("kept", [LONG[2:], LONG[3:]])
def test_oldest_messages_go_first_whole(kept: list[dict[str, Any]], role: str) -> None:
    instructions = SYSTEM | {"role": role}
    long = [instructions, *LONG[1:]]
    shortened = fitting(10_000, "truncate_left").encode_many(
        [[instructions, *kept, *answer] for answer in ANSWERS],
    )
    for limit in (max(map(len, shortened)), max(map(len, shortened)) + 5):
        assert fit_all(fitting(limit, "truncate_left"), long, ANSWERS) == shortened
        fitted = fitting(limit, "truncate_left").fit([*long, *ANSWERS[0]])
        assert fitted is not None and fitted.truncated


def test_a_completion_that_calls_tools_keeps_its_question_and_its_calls() -> None:
    result = {"role": "tool", "content": "Rye."}
    completion = [assistant("Let me look."), result, assistant("It is rye.")]
    asked = [SYSTEM, user("Which flour?")]
    kept = fitting(10_000, "truncate_left").encode([*asked, *completion])
    long = [SYSTEM, user("bread " * 40), assistant("salt " * 40), asked[1], *completion]
    fitted = fitting(len(kept), "truncate_left").fit(long)
    assert fitted is not None and fitted.token_ids == kept
    # Where the question has to be cut the completion is not.
    tail = fitting(10_000, "truncate_left").encode(completion)[1:]
    cut = fitting(len(tail) + 12, "truncate_left").fit([user("bread " * 90), *completion])
    assert cut is not None and cut.token_ids[-len(tail) :] == tail
    assert fitting(len(tail), "truncate_left").fit([user("bread " * 90), *completion]) is None


def test_completions_of_similar_length_keep_the_same_context() -> None:
    renderer = fitting(240, "truncate_left")
    context = [user("flour " * 300)]
    answers = [[assistant("salt " * words)] for words in range(1, 40)]
    whole = renderer.encode_many([[*context, *answer] for answer in answers])
    cuts = [
        len(full) - len(cut or [])
        for full, cut in zip(whole, fit_all(renderer, context, answers), strict=True)
    ]
    assert len(set(cuts)) < 12 < len(set(map(len, whole))) and cuts == sorted(cuts)


@settings(max_examples=60)
@given(
    context=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "system"]), st.integers(0, 25)),
        max_size=5,
    ),
    answer=st.text("abc é🙂\n", max_size=30),
    max_length=st.integers(1, 150),
    adds_bos=st.booleans(),
)
def test_truncation_spares_every_answer(
    context: list[tuple[str, int]],
    answer: str,
    max_length: int,
    adds_bos: bool,
) -> None:
    messages = [{"role": role, "content": "bread " * words + "?"} for role, words in context]
    renderer = fitting(max_length, "truncate_left", adds_bos=adds_bos)
    whole = renderer.encode([*messages, assistant(answer)])
    tail = renderer.encode([assistant(answer)])[int(adds_bos) :]
    fitted = renderer.fit([*messages, assistant(answer)])
    if len(whole) <= max_length:
        assert fitted is not None and fitted.token_ids == whole
    elif fitted is None:  # nothing less would do: even the last message's last token is too much
        assert len(tail) + int(adds_bos) + 1 > max_length or not messages
    else:
        cut = fitted.token_ids
        assert fitted.truncated and len(cut) <= max_length
        assert cut[-len(tail) :] == tail and len(cut) > len(tail)
        assert not adds_bos or (
            cut[0] == renderer.tokenizer.bos_token_id and len(cut) > len(tail) + 1
        )


def test_fingerprint_follows_what_changes_the_ids() -> None:
    tokenizer = byte_bpe()
    base = Renderer(tokenizer, chat_template=CHATML)
    others = [
        Renderer(tokenizer, chat_template=CHATML + " "),
        Renderer(tokenizer, chat_template=CHATML, chat_template_kwargs={"enable_thinking": False}),
        Renderer(tokenizer, chat_template=CHATML, max_length=10),
        Renderer(tokenizer, chat_template=CHATML, truncation="error"),
        Renderer(byte_bpe(("<|im_end|>", "<|im_start|>")), chat_template=CHATML),
        Renderer(byte_bpe(eos=None), chat_template=CHATML),
    ]
    assert len({renderer.fingerprint for renderer in [base, *others]}) == 7
    padded = pickle.loads(pickle.dumps(tokenizer))
    padded.pad_token = "<|im_end|>"
    before, after = (Renderer(padded, chat_template=CHATML) for _ in range(2))
    assert before.fingerprint != base.fingerprint
    padded(["a", "a b c"], padding=True, truncation=True, max_length=3)
    assert after.fingerprint == before.fingerprint


def test_fingerprint_follows_the_number_of_bos_where_the_template_does_not_show_it() -> None:
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), "<s>", "<|im_end|>", True)
    none, one = (
        Renderer(tokenizer, chat_template="<s>" + CHATML, num_bos=number) for number in (0, 1)
    )
    assert none.chat_template == one.chat_template and none.encode(CHAT) != one.encode(CHAT)
    assert none.fingerprint != one.fingerprint


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.num_characters = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer(texts, **options)


def test_a_huge_text_never_reaches_the_tokenizer(tiny_tokenizer: Any) -> None:
    counting = Counting(tiny_tokenizer)
    renderer = Renderer(counting, max_length=64)
    before = counting.num_characters
    [(fitted, num_tokens)] = renderer.fit_many([[user("word " * 200_000)]], where=["t.jsonl:1"])
    assert fitted is None and num_tokens > 64
    assert counting.num_characters - before < 50_000


def test_a_template_that_writes_too_much_is_an_error(
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_bounds, "MAX_CHARACTERS", 2**12)
    doubling = "{% for message in messages %}{{ message['content'] * 9000 }}{% endfor %}"
    with pytest.raises(TreewardError, match="more than 4,096 characters"):
        Renderer(tiny_tokenizer, chat_template=doubling).render([user("Hi")])
