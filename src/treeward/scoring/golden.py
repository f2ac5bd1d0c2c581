"""`sign_folder`: score the golden conversations and write the scoring contract into a model folder.

    sign_folder(Path("results/rm/final"))                                     # load, score, write the contract
    sign_exported(folder, model=run.model, renderer=run.renderer)             # a model that was just exported there

Each golden conversation holds something that goes wrong somewhere. Their scores are computed in float32 from the
weights as they are saved, along with the scores that known mistakes would give.

Shapes: S golden conversations, H heads.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.data.conversation import Conversation, Message
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, ModelError
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
    read_contract,
    readme_sha256,
    text_sha256,
    write_contract,
)
from treeward.model.loading import PAD_TOKEN, load_classifier
from treeward.model.lora import has_adapters
from treeward.model.pretrained import DTYPES, has_room, load_tokenizer
from treeward.model.reward_model import RewardModel, check_finite, stored_heads
from treeward.model.stored import StoredModel, architecture_of, dtype_of, sha256_of
from treeward.parallel.mesh import Mesh
from treeward.parallel.sharding import plain_copy
from treeward.version import VERSION

logger = logging.getLogger(__name__)


def _chat(*texts: str, system: str | None = None) -> Conversation:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    messages: list[Message] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return Conversation(messages if system is None else [{"role": "system", "content": system}, *messages])


_CALL = {"id": "tide00001", "type": "function", "function": {"name": "next_tide", "arguments": {"port": "Brest"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "next_tide",
        "description": "When the next high water is.",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
    },
}


_TIDES = """\
Tides come from the way the pull of the Moon, and less so of the Sun, changes across the Earth. On the side that faces \
the Moon the water is drawn a little more strongly than the ground below it; on the far side a little less. So there \
are two bulges, and the Earth turns beneath them once a day, which is why most coasts see two high waters in about \
twenty-five hours: the extra hour is the distance that the Moon has gone on in the meantime.

1. At new and full moon the Sun helps, and the range is large (spring tide).
2. At half moon it pulls across, and the range is small (neap tide)."""

GOLDEN_CONVERSATIONS: Mapping[str, Conversation] = {
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
    "tools": Conversation(
        [
            {"role": "user", "content": "When is high water in Brest?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "tide00001", "name": "next_tide", "content": "14:20"},
            {"role": "assistant", "content": "At 14:20."},
        ],
        tools=[_TOOL],
    ),
}
"""Conversations by what is special about them."""

HASH_DIGITS = 12
"""Digits that a contract keeps of the hash of a tensor."""

_ALONE = Mesh()


def sign_folder(
    folder: Path,
    *,
    like: ScoringContract | None = None,
    head_weights: Mapping[str, float] | Sequence[float] | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> ScoringContract:
    """Make the contract of a model folder, which is loaded in float32 onto `device`, write it there, and return it.

    `like`: a contract whose rendering, read position and heads hold for this model too; None: the tokenizer's
    own template, the model's own limit, and the position at which plain transformers reads. `head_weights`: those of
    `weighted_heads`; None: as in `like`. Raises `ConfigError` for several labels without weights, `ModelError` for
    a model that gives no finite score.
    """
    stored = StoredModel(folder)
    if not stored.tensors:  # which raises for a folder of adapters, and for one without a model
        raise ModelError("the files of weights are empty", where=str(folder))
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    has_template = bool(tokenizer.chat_template)
    pads_alike = stored.pad_token_id == tokenizer.pad_token_id  # loading may change the tokenizer's
    model = load_classifier(
        folder,
        tokenizer=tokenizer,
        device=device,
        several_heads=True,
        trust_remote_code=trust_remote_code,
        keep_padding=keeps_padding(like),
    ).model
    renderer = Renderer(tokenizer, **(like.rendering.settings if like else {}))
    if head_weights is not None:
        heads = weighted_heads(_labels(model), head_weights)
    elif like is not None and len(like.heads) == model.num_heads:
        heads = like.heads
    else:
        heads = _default_heads(model)
    return sign_exported(
        folder,
        model=model,
        renderer=renderer,
        heads=heads,
        is_loaded=True,
        pads_alike=pads_alike,
        has_template=has_template,
        trained_length=like.rendering.trained_length if like else None,
    )


def sign_exported(
    folder: Path,
    *,
    model: RewardModel,
    renderer: Renderer,
    heads: Sequence[HeadContract] | None = None,
    mesh: Mesh = _ALONE,
    is_checkpoint: bool = False,
    is_loaded: bool = False,
    pads_alike: bool | None = None,
    has_template: bool = True,
    trained_length: int | None = None,
) -> ScoringContract:
    """`sign_folder` of a model that was exported with `renderer`; every process of `mesh` calls it.

    The golden scores are of the weights in memory. Of a checkpoint only the head is hashed, as all tensors take about a
    second per GB, and weights that give no finite score are signed with a warning. `heads`: None for a model whose
    score is its only value, or their sum. `is_loaded`: the model was loaded from the folder. `pads_alike`: config.json
    and tokenizer have one padding token; None: they are compared. `has_template`: the folder has a chat template.
    """
    stored = StoredModel(folder)
    stored.config = processes.on_main(lambda: stored.config)
    heads, tokenizer = list(heads or _default_heads(model)), renderer.tokenizer
    if pads_alike is None:
        pads_alike = stored.pad_token_id == tokenizer.pad_token_id
    saved = partial(_as_saved, model, None if is_loaded else DTYPES[stored.config_dtype or "float32"], mesh)
    with saved(computed=torch.float32) as exact:
        golden = _golden(exact, renderer, heads, may_be_broken=is_checkpoint)
    rows = [example.token_ids for example in golden]
    with saved(computed=torch.bfloat16) as rounded:
        scores = [combined_heads(values, heads) for values in rounded.score_tokens(rows).tolist()]

    def sign() -> ScoringContract:
        backbone, head = stored.split(stored_heads(model.hf))
        dtype, pad = dtype_of(backbone), stored.pad_token_id
        is_read_alike = model.read_position != "last token" or all(row[-1] != pad for row in rows)
        is_plain = pads_alike and is_read_alike and bool(rows) and not getattr(model.hf, "made_by_treeward", False)
        begins_with_bos = bool(rows) and all(row[0] == tokenizer.bos_token_id for row in rows)
        contract = ScoringContract(
            treeward_version=VERSION,
            rendering=RenderingContract(
                chat_template_sha256=text_sha256(renderer.chat_template),
                chat_template=renderer.chat_template,
                template_in_folder=has_template,
                chat_template_kwargs=renderer.chat_template_kwargs,
                max_length=renderer.max_length if renderer.truncation == "truncate_left" else None,
                trained_length=trained_length or renderer.max_length,
                truncation=renderer.truncation,
                frame="cls_sep" if renderer.kind == "encoder" else "bos" if begins_with_bos else "none",
                num_bos=renderer.num_bos,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=pad,
                tokenizer_sha256=tokenizer_sha256(tokenizer),
            ),
            read=ReadContract(position=model.read_position, plain_transformers=is_plain, token=renderer.read_token),
            dtypes=DtypeContract(weights=dtype, head=dtype_of(head), config=stored.config_dtype or dtype),
            heads=heads,
            problem_type=stored.config.get("problem_type"),
            weights=WeightsContract(
                architecture=type(model.hf).__name__,
                num_parameters=stored.num_parameters,
                num_tensors=len(stored.tensors),
                shapes_sha256=stored.shapes_sha256,
                head_sha256=sha256_of(head),
                config=architecture_of(stored.config),
                **({} if is_checkpoint else _hashes(stored)),
            ),
            golden=golden,
            tolerance=_tolerance(golden, scores),
            readme_sha256=readme_sha256(folder),
        )
        write_contract(contract, folder)
        return contract

    return processes.on_main(sign)


def hash_all(folder: Path, renderer: Renderer, max_positions: int | None) -> None:
    """Add the hashes of all tensors to a contract that was signed as a checkpoint's. Raises `ModelError` where that
    left out golden conversations without a finite score."""
    contract = read_contract(folder)
    assert contract is not None
    broken = _rendered(renderer, max_positions).keys() - {example.name for example in contract.golden}
    if broken:
        summary, fix = "the model gives no finite score to golden conversations", "export an earlier checkpoint"
        raise ModelError(summary, where=str(folder), got=", ".join(sorted(broken)), fix=fix)
    weights = contract.weights.model_copy(update=_hashes(StoredModel(folder)))
    changes = {"weights": weights, "readme_sha256": readme_sha256(folder)}
    write_contract(contract.model_copy(update=changes), folder)


def _hashes(stored: StoredModel) -> dict[str, Any]:
    """The fields of a `WeightsContract` that need the bytes of all tensors."""
    hashes = {tensor.name: sha256_of([tensor]) for tensor in stored.tensors}
    return {
        "sha256": text_sha256(json.dumps(sorted(hashes.items()))),
        "tensors": {name: digest[:HASH_DIGITS] for name, digest in hashes.items()},
    }


@contextlib.contextmanager
def _as_saved(
    model: RewardModel, saved: torch.dtype | None, mesh: Mesh = _ALONE, computed: torch.dtype = torch.float32
) -> Iterator[RewardModel]:
    """The model that a folder with the weights of `model` in the dtype `saved` holds, to be scored with exactly.

    It is the model itself where that computes the same (`saved` is None: it was loaded from there), and else a copy
    with merged adapters and rounded weights, sharded as the model is.
    """
    is_sharded = mesh.devices is not None
    dtypes = {parameter.dtype for parameter in model.weights()}
    if saved is None or not (is_sharded or has_adapters(model) or dtypes != {saved}):
        with exact_scoring(model), model.computing_in(computed):
            yield model
        return
    num_bytes = 7 * model.hf.num_parameters()  # in float32, and for the tolerance in bfloat16 too
    device = model.device if has_room(model.device, num_bytes) else torch.device("cpu")
    copied = plain_copy(model, mesh, saved=saved, computed=computed, device=None if is_sharded else device)
    with exact_scoring(copied):
        yield copied
    del copied
    gc.collect()  # FSDP's hooks hold its modules in cycles


@contextlib.contextmanager
def exact_scoring(model: RewardModel) -> Iterator[None]:
    """Within it the model scores in the dtype of its weights, and float32 products are not rounded to TF32 or bfloat16,
    whatever `policy.matmul_precision` is; afterwards it trains or scores as before."""
    was_training, common = model.training, torch.get_float32_matmul_precision()
    counters = model.num_computed_tokens, model.num_row_tokens
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv)
    precisions = [product.fp32_precision for product in products]  # each may follow PyTorch's common setting
    model.eval()
    try:
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.conv.fp32_precision = "ieee"
        yield
    finally:
        torch.set_float32_matmul_precision(common)
        for product, precision in zip(products, precisions, strict=True):
            product.fp32_precision = precision
        model.train(was_training)
        model.num_computed_tokens, model.num_row_tokens = counters


def weighted_heads(labels: Sequence[str], weights: Mapping[str, float] | Sequence[float]) -> list[HeadContract]:
    """The heads of a model with `labels`: a weight for each in order, or by name, where those not named have none.

    Raises `ConfigError` for weights of other labels, for another number of them, and for weights that are all zero.
    """
    if isinstance(weights, Mapping):
        fits = all(list(labels).count(name) == 1 for name in weights)  # a name may be that of two heads
        values = [weights.get(label, 0.0) for label in labels]
    else:
        fits, values = len(weights) == len(labels), list(weights)
    if not fits or not any(values) or not all(map(math.isfinite, values)):
        raise ConfigError(
            "the weights of the heads do not fit the model",
            field="head_weights",
            got=dict(weights) if isinstance(weights, Mapping) else values,
            need=f"a finite number for each of the labels {', '.join(labels)}, not all of them zero",
        )
    if len(labels) == 1:
        return [HeadContract(weight=values[0])]
    meaning = "the attribute of this name"
    return [HeadContract(name=label, meaning=meaning, weight=x) for label, x in zip(labels, values, strict=True)]


def combined_heads(values: Sequence[float], heads: Sequence[HeadContract]) -> float:
    """The score: sum of weight times value over the heads."""
    return sum(head.weight * value for head, value in zip(heads, values, strict=True))


def _labels(model: RewardModel) -> list[str]:
    config: Any = model.hf.config
    return list(model.score_parts) or [str(config.id2label.get(i, f"head {i}")) for i in range(model.num_heads)]


def _default_heads(model: RewardModel) -> list[HeadContract]:
    if model.score_parts:
        return [HeadContract(name=name, meaning="its share of the score") for name in model.score_parts]
    if model.num_heads > 1:
        raise ConfigError(
            "the model has several labels, and nothing says how they make one score",
            got=", ".join(_labels(model)),
            fix="treeward verify MODEL --write --head-weights NAME=1,... writes a contract that does",
        )
    return [HeadContract()]


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary, the merges and the special tokens; other rules of ids (normalisation, splitting) show
    in the golden conversations. It does not depend on how a version of `tokenizers` writes its files."""
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


def _tolerance(golden: Sequence[GoldenExample], rounded: Sequence[float]) -> ToleranceContract:
    """By how much scores of this model may differ, measured by how much they differ in bfloat16 (`rounded`).

    bfloat16 keeps 8 bits of a number and float32 24, so rounding is 2^16 times coarser, and a model amplifies both
    alike; 2^8 of it are left to other orders of summation, and to other conversations than these ten.
    """
    off = [abs(score - example.score) for score, example in zip(rounded, golden, strict=True)]
    worst = max(filter(math.isfinite, off), default=0.0)
    largest = max((abs(example.score) for example in golden), default=1.0)
    float32 = max(worst / 256, 1e-5 * largest, 1e-7)
    return ToleranceContract(float32=float32, bfloat16=max(8 * worst, 2**-6 * largest, 1e-5))


def _golden(
    model: RewardModel, renderer: Renderer, heads: Sequence[HeadContract], may_be_broken: bool
) -> list[GoldenExample]:
    """The golden conversations that the template and the limits allow, with their scores."""
    rendered = _rendered(renderer, model.max_positions)
    if not rendered:
        logger.warning("The chat template or the limit of %s tokens refuses every golden conversation: the scoring "
                       "contract has none, so scores cannot be replayed.", renderer.max_length)  # fmt: skip
    bos = None if model.layout == "encoder" else model.hf.config.get_text_config().bos_token_id
    mistaken = [dict(_mistaken(ids, bos, model, renderer.adds_bos)) for ids in rendered.values()]
    right_SH: list[list[float]] = model.score_tokens(list(rendered.values())).tolist()
    padding, model.padding_token = model.padding_token, None  # a mistake reads whatever comes last
    wrong = iter(model.score_tokens([ids for rows in mistaken for ids in rows.values()]).tolist())
    model.padding_token = padding
    examples = []
    for (name, ids), rows, values in zip(rendered.items(), mistaken, right_SH, strict=True):
        mistakes = {mistake: combined_heads(next(wrong), heads) for mistake in rows}
        if may_be_broken and not all(map(math.isfinite, values)):
            continue
        check_finite(values, f"the golden conversation {name!r}", len(ids))
        examples.append(
            GoldenExample(
                name=name,
                messages=[dict(message) for message in GOLDEN_CONVERSATIONS[name]],
                chat_template_kwargs=GOLDEN_CONVERSATIONS[name].template_kwargs,
                token_ids=ids,
                score=combined_heads(values, heads),
                heads=values,
                mistakes={mistake: score for mistake, score in mistakes.items() if math.isfinite(score)},
            )
        )
    if len(examples) < len(rendered):
        logger.warning("The model gives no finite score to %d of %d golden conversations: its weights are broken.",
                       len(rendered) - len(examples), len(rendered))  # fmt: skip
    return examples


def _rendered(renderer: Renderer, max_positions: int | None) -> dict[str, list[int]]:
    """The tokens of the golden conversations that the template and the limits allow."""
    rendered: dict[str, list[int]] = {}
    for name, conversation in GOLDEN_CONVERSATIONS.items():
        if any(not renderer.reads(variable) for variable in conversation.template_kwargs):
            continue
        with contextlib.suppress(DataError):  # the template refuses it
            fitted = renderer.fit(conversation)
            if fitted is not None and (max_positions is None or len(fitted.token_ids) <= max_positions):
                rendered[name] = [int(token) for token in fitted.token_ids]
    return rendered


def _mistaken(
    ids: list[int], bos: int | None, model: RewardModel, adds_bos: bool
) -> Iterator[tuple[Mistake, list[int]]]:
    if model.layout == "encoder" or len(ids) < 3:
        return
    end = list(model.until_padding(ids))
    yield ("read_before_end", ids[:-1]) if end == ids else ("read_at_padding", ids)
    if bos is not None and end[0] == bos:
        yield "no_bos", end[1:]
    if bos is not None and (adds_bos or end[0] == bos) and (model.max_positions or math.inf) > len(end):
        yield "two_bos", [bos, *end]
