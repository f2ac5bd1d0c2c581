"""`treeward verify --against`: servers that make each known mistake are told apart, and ours is
found to make none.

The servers here have the real model, and make their mistakes with it: on its tokens, its padding,
its number format.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Asked, Loopback, serving_on_loopback
from scipy.special import expit
from signed import SIZES, contract_of
from templates import CHATML, byte_bpe
from verbs import Command, Ended

from treeward.client.dialects import DIALECTS
from treeward.client.verification import verify_server
from treeward.config.load import load_section
from treeward.data.rendering import Renderer
from treeward.model.contract import CONTRACT_FILE, HeadContract, write_contract
from treeward.model.export import export_model
from treeward.model.loading import build_reward_model
from treeward.model.reward_model import RewardModel
from treeward.scoring.golden import sign_exported

OTHER_TURN = "{{ m['role'] + ': ' + m['content'] + '<|im_end|>\n' }}"
OTHER_TEMPLATE = f"{{% for m in messages %}}{OTHER_TURN}{{% endfor %}}"
FIELDS = {"model_type": "llama", **SIZES}

Rows = list[list[int]]


@dataclass(frozen=True)
class Served:
    """A signed folder, and what serves it: the model with its renderer, and another model of the
    same form.
    """

    folder: Path
    model: RewardModel
    other: RewardModel
    renderer: Renderer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A decoder whose tokenizer adds a BOS, and whose conversations end with a newline after the
    end of turn.
    """
    tokenizer = copy.deepcopy(
        byte_bpe(("<|im_start|>", "<|im_end|>", "<|endoftext|>"), bos="<s>", adds_bos=True),
    )
    tokenizer.pad_token = "<|endoftext|>"
    renderer = Renderer(tokenizer, chat_template=CHATML, max_length=1500)
    model, other = (build_reward_model(FIELDS, tokenizer, seed=seed).model for seed in (3, 4))
    for one in (model, other):  # scores of the size of a trained model's
        with torch.no_grad():
            one.hf.get_parameter("score.weight").mul_(5.0)
    folder = tmp_path_factory.mktemp("served") / "rm"
    export_model(model, tokenizer, folder, chat_template=renderer.chat_template)
    sign_exported(folder, model=model, renderer=renderer)
    return Served(folder, model, other, renderer)


@dataclass
class Mistaken:
    """A server as vLLM, with one thing about it that is wrong. `tokenize`: text to token ids."""

    served: Served
    tokenize: Callable[[str], list[int]] | None = None
    activation: Callable[[float], float] = lambda x: x
    model: RewardModel | None = None
    pads: bool = False
    template: str | None = None

    def __call__(self, asked: Asked) -> Any:
        ids = self._ids(asked.json)
        rows = []
        for i, score in enumerate(self._scores(ids)):
            probs = [self.activation(score)]
            rows.append({"index": i, "label": "LABEL_0", "probs": probs, "num_classes": 1})
        total = sum(map(len, ids))
        return 200, {
            "object": "list",
            "data": rows[::-1],
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }

    def _ids(self, sent: dict[str, Any]) -> Rows:
        if "messages" in sent:
            renderer = self.served.renderer
            if self.template is not None:
                renderer = Renderer(renderer.tokenizer, chat_template=self.template)
            return [renderer.encode(sent["messages"])]
        tokenize = self.tokenize if sent.get("add_special_tokens", True) else None
        texts = [sent["input"]] if isinstance(sent["input"], str) else sent["input"]
        return [(tokenize or self._plain)(text) for text in texts]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self.served.renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _scores(self, rows: Rows) -> list[float]:
        model = self.model or self.served.model
        if self.pads and len(rows) > 1:
            pad = self.served.renderer.tokenizer.pad_token_id
            longest = max(map(len, rows))
            rows = [[*row, *[pad] * (longest - len(row))] for row in rows]
        return [values[0] for values in model.score_tokens(rows).tolist()]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Asked], Any]], Loopback]]:
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(Loopback(answer))


@pytest.fixture
def verify(treeward: Command, served: Served) -> Callable[..., Ended]:
    """`treeward verify` of the folder against a server that speaks as vLLM."""
    return lambda url, *words: treeward(
        "verify",
        served.folder,
        "--against",
        url,
        "--dialect",
        "vllm",
        *words,
    )


def test_a_server_without_a_mistake(
    served: Served,
    serve: Any,
    verify: Callable[..., Ended],
) -> None:
    server = serve(Mistaken(served))
    ended = verify(server.url + DIALECTS["vllm"].path)
    assert ended.code == 0, ended
    assert "differs" not in ended.out, ended
    assert "(as vllm, text sent" in ended.out
    assert ": equal: 10 golden scores, to within" in ended.out
    posts = [request for request in server.requests if request.method == "POST"]
    assert len(posts) == 11  # each alone, and all together
    assert "model" not in posts[0].json
    assert posts[0].json["use_activation"] is False


def rounded(served: Served) -> RewardModel:
    """A model that computes in bfloat16; vLLM computes an export in float16 unless it is told
    otherwise.
    """
    model = copy.deepcopy(served.model)
    model.cast(torch.bfloat16)
    return model


MISTAKES: dict[str, tuple[Callable[[Served], dict[str, Any]], str, str]] = {
    "sigmoid": (lambda s: {"activation": expit}, "activation", "a sigmoid is applied to the score"),
    "bfloat16": (
        lambda s: {"model": rounded(s)},
        "precision",
        "(vLLM, SGLang, TEI: --dtype float32)",
    ),
    "two BOS": (
        lambda s: {"tokenize": lambda x: s.renderer.tokenizer(x)["input_ids"]},
        "tokens",
        "one BOS too many",
    ),
    "another model": (lambda s: {"model": s.other}, "weights", "no known mistake explains them"),
    "padding": (
        lambda s: {"pads": True},
        "read position",
        "beside others: the server reads padding",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_named(
    mistake: str,
    served: Served,
    serve: Any,
    verify: Callable[..., Ended],
) -> None:
    settings, part, words = MISTAKES[mistake]
    ended = verify(serve(Mistaken(served, **settings(served))).url)
    assert ended.code == 1, ended
    last = ended.out.split("\n\n")[-1]
    assert f"what differs first is the {part}: " in last, last
    assert words in last, last
    assert all(f"  {name}: " in last for name in ("got", "need", "fix")), last


def test_another_template(served: Served, serve: Any, verify: Callable[..., Ended]) -> None:
    url = serve(Mistaken(served, template=OTHER_TEMPLATE)).url
    assert verify(url).code == 0, "it is not used for text"
    ended = verify(url, "--send", "messages")
    assert ended.code == 1
    assert "the template: the server renders conversations in another way" in ended.out


def test_a_folder_that_cannot_be_replayed(treeward: Command, own_model: Path) -> None:
    (own_model / CONTRACT_FILE).unlink()
    ended = treeward("verify", own_model, "--against", "http://127.0.0.1:1")
    assert ended.code == 2
    assert "no golden conversations" in ended.err


@pytest.fixture(scope="module")
def our_server(served: Served) -> Iterator[str]:
    """Our own server on a socket, with this model and one that is served with shaping."""
    from treeward.config.server import ServerConfig
    from treeward.serving.service import Service

    shaped = {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 2.0}
    sections = [
        {"model": str(served.folder), "name": "rm", "device": "cpu"},
        {"model": str(served.folder), "name": "shaped", "device": "cpu", "shaping": shaped},
    ]
    with serving_on_loopback(
        Service.load(load_section(ServerConfig, {"models": sections}, where="server")),
    ) as url:
        yield url


@pytest.mark.parametrize(
    ("dialect", "form"),
    [(name, form) for name, dialect in DIALECTS.items() for form in dialect.forms],
)
def test_our_server_in_every_dialect_and_form(
    dialect: str,
    form: Any,
    served: Served,
    our_server: str,
) -> None:
    result = verify_server(served.folder, our_server, dialect=dialect, form=form)
    assert result.equal, result.first_difference
    assert result.largest_difference is not None
    assert result.largest_difference < 1e-5


def test_heads_by_the_labels_of_a_server(served: Served, serve: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(served.folder, tmp_path / "rm"))
    contract = contract_of(folder)
    heads = [
        HeadContract(name="helpfulness", weight=1.0),
        HeadContract(name="verbosity", weight=0.0),
    ]
    write_contract(contract.model_copy(update={"heads": heads}), folder)
    by_text = {}
    for example in contract.golden:
        by_text[served.renderer.render(example.messages)] = example.score

    def answer(asked: Asked) -> Any:
        rows = []
        for [text] in asked.json["inputs"]:
            # By score, as TEI gives them.
            first = {"score": 100.0, "label": "LABEL_1"}
            rows.append([first, {"score": by_text[text], "label": "LABEL_0"}])
        return 200, rows

    result = verify_server(folder, serve(answer).url, dialect="tei")
    assert result.equal, result.first_difference


def test_another_models_server_is_told_by_its_contract(
    our_server: str,
    model_folder: Path,
    treeward: Command,
) -> None:
    ended = treeward("verify", model_folder, "--against", our_server)
    assert ended.code == 1
    assert "the contract: the server's model has another scoring contract\n" in ended.out


def test_our_server_says_whose_contract_it_keeps(
    served: Served,
    our_server: str,
    treeward: Command,
) -> None:
    ended = treeward("verify", served.folder, "--against", our_server)
    assert ended.code == 0
    assert "as the server says" in ended.out


def test_scores_are_raw_where_the_dialect_can_ask_for_it(
    served: Served,
    our_server: str,
    treeward: Command,
) -> None:
    words = ("verify", served.folder, "--against", our_server, "--model", "shaped")
    assert treeward(*words).code == 0
    ended = treeward(*words, "--dialect", "vllm")
    assert ended.code == 1
    assert "scaled and shifted: 0.5 x score -0.5" in ended.out


def test_a_dialect_that_is_not_known_has_the_nearest_name(
    served: Served,
    treeward: Command,
) -> None:
    ended = treeward("verify", served.folder, "--against", "http://127.0.0.1:9", "--dialect", "vlm")
    assert ended.code == 2
    assert "did you mean vllm" in ended.err


def test_a_vllm_that_counts_no_tokens_is_read() -> None:
    response = {"data": [{"index": 0, "probs": [0.5]}], "usage": None}
    (score,) = DIALECTS["vllm"].read(response)
    assert (score.values, score.num_tokens) == ([0.5], None)
