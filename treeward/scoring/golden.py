"""`sign_folder`: score the golden conversations and write the scoring contract into a model folder.

    sign_folder(Path("results/rm/final"))                                     # load, score, write the contract
    sign_later(folder, model=run.model, renderer=run.renderer)()              # a model that was just exported there

Each golden conversation holds something that goes wrong somewhere: several turns, a system message, letters beyond
ASCII, code, white space at the end, a very short completion, a long one. Their scores are computed in float32 from the
weights as they are saved, along with the scores that known mistakes would give.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.reward_shaping import RewardShapingConfig
from treeward.data.preference import Message
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError
from treeward.model.checks import plain_values
from treeward.model.contract import (
    DtypeContract,
    GoldenExample,
    HeadContract,
    Mistake,
    ReadContract,
    RenderingContract,
    ScoringContract,
    ToleranceContract,
    WeightsContract,
    keeps_padding,
    text_sha256,
    write_contract,
)
from treeward.model.loading import PAD_TOKEN, load_reward_model
from treeward.model.lora import has_adapters
from treeward.model.pretrained import DTYPES, load_tokenizer, read_config
from treeward.model.published import find
from treeward.model.reward_model import RewardModel, check_finite, stored_heads
from treeward.model.stored import (
    StoredTensor,
    architecture_of,
    dtype_of,
    has_template,
    named_dtype,
    num_parameters,
    of_head,
    raw_config,
    raw_pad_token_id,
    read_stored,
    sha256_of,
    shapes_sha256,
)
from treeward.parallel.mesh import Mesh
from treeward.parallel.sharding import plain_copy
from treeward.tree.token_tree import TokenIds
from treeward.version import VERSION

logger = logging.getLogger(__name__)


def _chat(*texts: str, system: str | None = None) -> list[Message]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    messages: list[Message] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


_TIDES = """\
Tides come from the way the pull of the Moon, and less so of the Sun, changes across the Earth. On the side that faces \
the Moon the water is drawn a little more strongly than the ground below it; on the far side a little less. So there \
are two bulges, and the Earth turns beneath them once a day, which is why most coasts see two high waters in about \
twenty-five hours: the extra hour is the distance that the Moon has gone on in the meantime.

1. At new and full moon the Sun helps, and the range is large (spring tide).
2. At half moon it pulls across, and the range is small (neap tide)."""

GOLDEN_CONVERSATIONS: Mapping[str, list[Message]] = {
    "question": _chat("Which river flows through Prague?", "The Vltava flows through Prague."),
    "same question, another completion": _chat("Which river flows through Prague?", "I would rather not say."),
    "greeting": _chat("Hi", "Hello!"),
    "system message": _chat("Where is my parcel?", "I'll look it up.", system="You work for a post office. Be brief."),
    "several turns": _chat(
        "Name a prime above 90.", "97.", "And the next one?", "101.", "Are you sure?", "Yes: 99 is 9 times 11."
    ),
    "beyond ASCII": _chat("Übersetze „наука“ – 谢谢! 🙏🏽", "„Wissenschaft“ – e\u0301tude, علم, विज्ञान 👩‍🔬"),
    "code": _chat("Sum a list.", "```python\ndef total(xs):\n\tn = 0\n\tfor x in xs:\n\t    n += x\n\treturn n\n```"),
    "white space at the end": _chat("Tell me a colour. ", "Blue  \n\n"),
    "one character": _chat("Is that so?", "."),
    "long completion": _chat("Why are there two tides a day?", _TIDES),
}
"""Conversations by what is special about them."""

_ALONE = Mesh()

HASH_DIGITS = 12
"""Digits that a contract keeps of the hash of a tensor."""


def sign_folder(
    folder: Path,
    *,
    like: ScoringContract | None = None,
    heads: Sequence[HeadContract] | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> ScoringContract:
    """Make the contract of a model folder, which is loaded in float32 onto `device`, write it there, and return it.

    `like`: a contract whose rendering, read position, heads and shaping hold for this model too; None: the tokenizer's
    own template, the model's own limit, and the position at which plain transformers reads. `heads`: how a model with
    several labels makes its score; None: as in `like`. Raises `ConfigError` for several labels without `heads`,
    `ModelError` for weights that give no finite score.
    """
    read_stored(folder)  # says so where these are adapters, or no model
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    pad = raw_pad_token_id(raw_config(folder))
    may_be_plain = pad == tokenizer.pad_token_id  # loading the model may mend it in memory
    model = load_reward_model(
        folder,
        tokenizer=tokenizer,
        device=device,
        several_heads=True,
        trust_remote_code=trust_remote_code,
        keep_padding=keeps_padding(like),
    ).model
    kept = {"chat_template_kwargs", "max_length", "truncation"}
    renderer = Renderer(tokenizer, **(like.rendering.model_dump(include=kept) if like else {}))
    if heads is None and like is not None and len(like.heads) == model.num_heads:
        heads = like.heads
    chosen = list(heads or _only_head(model))
    measured = _measured(partial(as_saved, model, None), renderer, chosen, pad, may_be_plain=may_be_plain)
    shaping = None if like is None else like.reward_shaping
    return _signed(folder, model, renderer, chosen, measured, shaping=shaping)


def sign_later(
    folder: Path,
    *,
    model: RewardModel,
    renderer: Renderer,
    heads: Sequence[HeadContract] | None = None,
    mesh: Mesh = _ALONE,
    is_checkpoint: bool = False,
) -> Callable[[], ScoringContract]:
    """`sign_folder` of a model that was exported with `renderer`, in two: it is run now, by every process of `mesh`;
    what is returned reads the files when they are written, in any thread of one process.

    The golden scores are of the weights in memory: files that hold others are refused when they are loaded. Of a
    checkpoint only the head is hashed, as all tensors take about a second per GB, and weights that give no finite score
    are signed with a warning. `heads`: as `sign_folder` has them.
    """
    config = processes.on_main(lambda: raw_config(folder))
    heads, pad = list(heads or _only_head(model)), raw_pad_token_id(config)
    measured = _measured(
        partial(as_saved, model, DTYPES[named_dtype(config, "dtype") or "float32"], mesh),
        *(renderer, heads, pad),
        may_be_plain=pad == renderer.tokenizer.pad_token_id,
        may_be_broken=is_checkpoint,
    )
    return partial(_signed, folder, model, renderer, heads, measured, only_head=is_checkpoint)


@contextlib.contextmanager
def as_saved(
    model: RewardModel, saved: torch.dtype | None, mesh: Mesh = _ALONE, computed: torch.dtype = torch.float32
) -> Iterator[RewardModel]:
    """The model that a folder with the weights of `model` in the dtype `saved` holds, to be scored with exactly.

    It is the model itself where that computes the same (`saved` is None: it was loaded from there), and else a copy
    with merged adapters and rounded weights, sharded as the model is.
    """
    sharded = mesh.devices is not None
    dtypes = {parameter.dtype for parameter in model.weights()}
    if saved is None or not (sharded or has_adapters(model) or dtypes != {saved}):
        with exact_scoring(model), model.computing_in(computed):
            yield model
        return
    device = None if sharded else _with_room(model.device, model.hf.num_parameters())
    copied = plain_copy(model, mesh, saved=saved, computed=computed, device=device)
    with exact_scoring(copied):
        yield copied
    del copied
    gc.collect()  # FSDP's hooks hold its modules in cycles


@dataclass(frozen=True, slots=True)
class _Measured:
    """The golden scores of a model, and whether plain transformers has them too."""

    golden: list[GoldenExample]
    tolerance: ToleranceContract
    is_plain: bool


def _measured(
    saved: Callable[..., contextlib.AbstractContextManager[RewardModel]],
    renderer: Renderer,
    heads: Sequence[HeadContract],
    pad: int | None,
    *,
    may_be_plain: bool,
    may_be_broken: bool = False,
) -> _Measured:
    """`saved`: `as_saved` of a model."""
    with saved(computed=torch.float32) as model:
        golden = _golden(model, renderer, heads, may_be_broken)
        rows = [example.token_ids for example in golden]
        may_be_plain &= bool(golden) and not getattr(model.hf, "made_by_treeward", False)
        plain = plain_values(model, rows, pad) if may_be_plain else torch.tensor(torch.inf)
    with saved(computed=torch.bfloat16) as model:
        rounded = [combined_heads(values, heads) for values in model.score_tokens(rows).tolist()]
    tolerance = _tolerance(golden, rounded)
    off = plain - torch.tensor([example.heads for example in golden])
    return _Measured(golden, tolerance, may_be_plain and bool(off.abs().max() <= tolerance.float32))


def _signed(
    folder: Path,
    model: RewardModel,
    renderer: Renderer,
    heads: list[HeadContract],
    measured: _Measured,
    *,
    shaping: RewardShapingConfig | None = None,
    only_head: bool = False,
) -> ScoringContract:
    """The contract of the files in a folder, where it is written too."""
    stored, config = read_stored(folder), raw_config(folder)
    head = of_head(stored, *stored_heads(model.hf))
    backbone_dtype = dtype_of([tensor for tensor in stored if tensor not in head])
    contract = ScoringContract(
        treeward_version=VERSION,
        rendering=_rendering(renderer, folder, raw_pad_token_id(config), measured.golden),
        read=ReadContract(
            position=model.read_position,
            plain_transformers=measured.is_plain,
            token=renderer.read_token,
        ),
        dtypes=DtypeContract(
            weights=backbone_dtype,
            head=dtype_of(head),
            config=named_dtype(config, "dtype") or named_dtype(config, "torch_dtype") or backbone_dtype,
        ),
        heads=heads,
        problem_type=config.get("problem_type"),
        reward_shaping=shaping,
        weights=_weights(type(model.hf).__name__, stored, head, config, only_head=only_head),
        golden=measured.golden,
        tolerance=measured.tolerance,
    )
    write_contract(contract, folder)
    return contract


def _with_room(device: torch.device, size: int) -> torch.device:
    """The device of a model in training, or the CPU where another one in float32 would not fit beside it."""
    if device.type != "cuda":
        return device
    torch.cuda.empty_cache()
    needed = 7 * size  # bytes: in float32, and for the tolerance in bfloat16 too
    return device if torch.cuda.mem_get_info(device)[0] > needed else torch.device("cpu")


def _weights(
    architecture: str,
    stored: Sequence[StoredTensor],
    head: Sequence[StoredTensor],
    config: Mapping[str, Any],
    *,
    only_head: bool,
) -> WeightsContract:
    hashes = {} if only_head else {tensor.name: sha256_of([tensor]) for tensor in stored}
    return WeightsContract(
        architecture=architecture,
        num_parameters=num_parameters(stored),
        num_tensors=len(stored),
        shapes_sha256=shapes_sha256(stored),
        head_sha256=sha256_of(head),
        sha256=text_sha256(json.dumps(sorted(hashes.items()))) if hashes else None,
        tensors={name: digest[:HASH_DIGITS] for name, digest in hashes.items()},
        config=architecture_of(config),
    )


def weighted_heads(labels: Sequence[str], weights: Mapping[str, float] | Sequence[float]) -> list[HeadContract]:
    """The heads of a model with `labels`: a weight for each in order, or by name, where those not named have none.

    Raises `ConfigError` for weights of other labels, for another number of them, and for weights that are all zero.
    """
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if list(labels).count(name) != 1]  # or of two heads
        values = [weights.get(label, 0.0) for label in labels]
    else:
        unknown, values = [], list(weights)
    if unknown or len(values) != len(labels) or not any(values) or not all(map(math.isfinite, values)):
        raise ConfigError(
            "the weights of the heads do not fit the model",
            field="head_weights",
            got=dict(weights) if isinstance(weights, Mapping) else values,
            need=f"a finite number for each of the labels {', '.join(labels)}, not all of them zero",
        )
    if len(labels) == 1:
        return [HeadContract(weight=values[0])]
    return [
        HeadContract(name=label, meaning="the attribute of this name", weight=value)
        for label, value in zip(labels, values, strict=True)
    ]


def head_labels(folder: Path, *, trust_remote_code: bool = False) -> list[str]:
    """The labels of a model folder by its config.json, one for each head; one for what is no classifier yet."""
    config = read_config(str(folder), trust_remote_code)
    if (adapter := find(config.to_dict(), config.name_or_path)) is not None:
        return list(adapter.parts(config.to_dict())) or ["reward"]
    is_classifier = any("SequenceClassification" in name for name in config.architectures or ())
    return _labels(config) if is_classifier else ["reward"]


def combined_heads(values: Sequence[float], heads: Sequence[HeadContract]) -> float:
    """The score: sum of weight times value over the heads."""
    return sum(head.weight * value for head, value in zip(heads, values, strict=True))


@contextlib.contextmanager
def exact_scoring(model: RewardModel) -> Iterator[None]:
    """Within it the model scores in the dtype of its weights, and float32 products are not rounded to TF32 or bfloat16,
    whatever `policy.matmul_precision` is; afterwards it trains or scores as before."""
    was_training = model.training
    counters = model.num_computed_tokens, model.num_row_tokens
    # the first sets what is set for both kinds of products; each kind may have been set by itself as well
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv)
    of_both, precisions = torch.get_float32_matmul_precision(), [one.fp32_precision for one in products]
    model.eval()
    try:
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.conv.fp32_precision = "ieee"
        yield
    finally:
        torch.set_float32_matmul_precision(of_both)
        for one, precision in zip(products, precisions, strict=True):
            one.fp32_precision = precision
        model.train(was_training)
        model.num_computed_tokens, model.num_row_tokens = counters


def frame_of(renderer: Renderer, rows: Sequence[TokenIds]) -> Literal["none", "bos", "cls_sep"]:
    """What the token ids of every conversation begin (and end) with, as `RenderingContract.frame`."""
    if renderer.kind == "encoder":
        return "cls_sep"
    bos = renderer.tokenizer.bos_token_id
    return "bos" if bos is not None and rows and all(row[0] == bos for row in rows) else "none"


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary, the merges and the special tokens.

    It survives saving and loading, and does not depend on how a version of `tokenizers` writes its files; what else
    decides about ids (normalisation, splitting) shows in the golden conversations.
    """
    merges: list[list[str]] = []
    scores: Any = None
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model.get("merges") or []]
        scores = model["vocab"] if isinstance(model.get("vocab"), list) else None
    names = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = {name: str(value) for name in names if (value := getattr(tokenizer, name, None)) is not None}
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if token != PAD_TOKEN}  # loading may add it
    parts = {"vocabulary": vocabulary, "merges": merges, "scores": scores, "special": special}
    return text_sha256(json.dumps(parts, sort_keys=True))


def _rendering(renderer: Renderer, folder: Path, pad: int | None, golden: Sequence[GoldenExample]) -> RenderingContract:
    tokenizer = renderer.tokenizer
    return RenderingContract(
        chat_template_sha256=text_sha256(renderer.chat_template),
        chat_template=renderer.chat_template,
        template_in_folder=has_template(folder),
        chat_template_kwargs=renderer.chat_template_kwargs,
        max_length=renderer.max_length,
        truncation=renderer.truncation,
        frame=frame_of(renderer, [example.token_ids for example in golden]),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
    )


def _only_head(model: RewardModel) -> list[HeadContract]:
    if model.score_parts:
        return [HeadContract(name=name, meaning="its share of the score") for name in model.score_parts]
    if model.num_heads > 1:
        raise ConfigError(
            "the model has several labels, and nothing says how they make one score",
            got=", ".join(_labels(model.hf.config)),
            fix="treeward verify MODEL --write --head-weights NAME=1,... writes a contract that does",
        )
    return [HeadContract()]


def _labels(config: Any) -> list[str]:
    labels: dict[Any, str] = config.id2label or {}
    return [str(labels.get(i, f"head {i}")) for i in range(config.num_labels)]


def _golden(
    model: RewardModel, renderer: Renderer, heads: Sequence[HeadContract], may_be_broken: bool
) -> list[GoldenExample]:
    """The golden conversations that the template and the limits allow, with their scores."""
    rendered: dict[str, list[int]] = {}
    for name, messages in GOLDEN_CONVERSATIONS.items():
        with contextlib.suppress(DataError):  # the template refuses it
            fitted = renderer.fit(messages)
            if fitted is not None and (model.max_positions is None or len(fitted.token_ids) <= model.max_positions):
                rendered[name] = [int(token) for token in fitted.token_ids]
    if not rendered:
        logger.warning("The chat template or the limit of %s tokens refuses every golden conversation: the scoring "
                       "contract has none, so scores cannot be replayed.", renderer.max_length)  # fmt: skip
    bos = None if model.layout == "encoder" else model.hf.config.get_text_config().bos_token_id
    mistaken = [dict(_mistaken(ids, bos, model)) for ids in rendered.values()]
    right: list[list[float]] = model.score_tokens(list(rendered.values())).tolist()
    padding, model.padding_token = model.padding_token, None  # a mistake reads whatever comes last
    wrong = iter(model.score_tokens([ids for rows in mistaken for ids in rows.values()]).tolist())
    model.padding_token = padding
    examples, num_broken = [], 0
    for (name, ids), rows, values in zip(rendered.items(), mistaken, right, strict=True):
        mistakes = {mistake: combined_heads(next(wrong), heads) for mistake in rows}
        if may_be_broken and not all(map(math.isfinite, values)):
            num_broken += 1
            continue
        check_finite(values, f"the golden conversation {name!r}", len(ids))
        examples.append(
            GoldenExample(
                name=name,
                messages=[dict(message) for message in GOLDEN_CONVERSATIONS[name]],
                token_ids=ids,
                score=combined_heads(values, heads),
                heads=values,
                mistakes={mistake: score for mistake, score in mistakes.items() if math.isfinite(score)},
            )
        )
    if num_broken:
        logger.warning("The model gives no finite score to %d of %d golden conversations: its weights are broken.",
                       num_broken, len(rendered))  # fmt: skip
    return examples


def _mistaken(ids: list[int], bos: int | None, model: RewardModel) -> Iterator[tuple[Mistake, list[int]]]:
    if model.layout == "encoder" or len(ids) < 3:
        return
    end = list(model.until_padding(ids))
    yield ("read_before_end", ids[:-1]) if end == ids else ("read_at_padding", ids)
    ids = end
    if bos is not None and ids[0] == bos:
        yield "no_bos", ids[1:]
        if model.max_positions is None or len(ids) < model.max_positions:
            yield "two_bos", [bos, *ids]


def _tolerance(golden: Sequence[GoldenExample], rounded: Sequence[float]) -> ToleranceContract:
    """By how much scores of this model may differ, measured by how much they differ in bfloat16 (`rounded`).

    bfloat16 keeps 8 bits of a number and float32 24, so rounding is 2^16 times coarser, and a model amplifies both
    alike. Another kernel adds up sums in another order and loses a few more bits, and ten conversations do not show the
    largest difference; 2^8 of the 2^16 are left for both. A TF32 product (11 bits) and rounded weights exceed the
    tolerance by an order of magnitude.
    """
    off = [abs(got - one.score) for got, one in zip(rounded, golden, strict=True)]
    worst = max(filter(math.isfinite, off), default=0.0)
    largest = max((abs(one.score) for one in golden), default=1.0)
    return ToleranceContract(
        float32=max(worst / 256, 1e-5 * largest, 1e-7), bfloat16=max(8 * worst, 2**-6 * largest, 1e-5)
    )
