"""`sign_folder`: score the golden conversations and write the scoring contract into a model folder.

    sign_folder(Path("results/rm/final"))                          # load, score, write it
    sign_exported(folder, model=run.model, renderer=run.renderer)  # a model just exported there

The scores of the golden conversations are computed in float32 from the weights as they are saved,
along with the scores that known mistakes would give.

Shapes: S golden conversations, H heads.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.scoring import HeadWeights, StepScore
from treeward.data.conversation import Conversation
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.contract import (
    STEPS_MEANING,
    DtypeContract,
    GoldenExample,
    HeadContract,
    Mistake,
    ReadContract,
    RenderingContract,
    ScoringContract,
    StepsContract,
    ToleranceContract,
    WeightsContract,
    keeps_padding,
    read_contract,
    readme_sha256,
    text_sha256,
    write_contract,
)
from treeward.model.heads import stored_heads
from treeward.model.loading import PAD_TOKEN, load_classifier
from treeward.model.lora import has_adapters
from treeward.model.pretrained import DTYPES, has_room, load_tokenizer
from treeward.model.reward_model import RewardModel, check_finite
from treeward.model.spread import SpreadReader
from treeward.model.stored import StoredModel, architecture_of, dtype_of, sha256_of
from treeward.parallel.mesh import Mesh
from treeward.parallel.sharding import plain_copy
from treeward.scoring.combining import score_of, values_of, weighted_heads
from treeward.scoring.golden_conversations import GOLDEN_CONVERSATIONS
from treeward.scoring.steps import Steps
from treeward.tree.token_tree import TokenIds
from treeward.version import VERSION

logger = logging.getLogger(__name__)

HASH_DIGITS = 12
"""Digits that a contract keeps of the hash of a tensor."""

_ALONE = Mesh()


def sign_folder(
    folder: Path,
    *,
    like: ScoringContract | None = None,
    head_weights: HeadWeights | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> ScoringContract:
    """Load a model folder in float32 onto `device`, write its contract there, and return it.

    `like`: a contract whose rendering, read position and heads hold for this model too; None: the
    tokenizer's own template, the model's own limit, and the position at which plain transformers
    reads. `head_weights`: as of a `Scorer`, of a process reward model what makes a score of its
    steps; None: as in `like`, and without one the product of the steps. Raises `ConfigError` for
    several labels without weights or with wrong ones, `ModelError` for a model that gives no
    finite score.
    """
    stored = StoredModel(folder)
    # `tensors` itself raises for a folder of adapters, and for one without a model.
    if not stored.tensors:
        raise ModelError("the files of weights are empty", where=str(folder))
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    has_template = bool(tokenizer.chat_template)
    # Asked before the model is loaded: loading may change the tokenizer's padding.
    pads_alike = stored.pad_token_id == tokenizer.pad_token_id
    model = load_classifier(
        folder,
        tokenizer=tokenizer,
        device=device,
        several_heads=True,
        steps=True,
        trust_remote_code=trust_remote_code,
        keep_padding=keeps_padding(like),
    ).model
    step_score: StepScore = "product"
    if like is not None and like.steps is not None:
        step_score = like.steps.score
    rendering: dict[str, Any] = {}
    trained_length = None
    if like is not None:
        rendering = like.rendering.settings
        trained_length = like.rendering.trained_length
    renderer = Renderer(tokenizer, **rendering)
    if head_weights is not None and model.step_token is not None:
        step_score = Steps(model.step_token, head_weights).how
        heads = _default_heads(model)
    elif head_weights is not None:
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
        step_score=step_score,
        is_loaded=True,
        pads_alike=pads_alike,
        has_template=has_template,
        trained_length=trained_length,
    )


def sign_exported(
    folder: Path,
    *,
    model: RewardModel,
    renderer: Renderer,
    heads: Sequence[HeadContract] | None = None,
    step_score: StepScore = "product",
    mesh: Mesh = _ALONE,
    is_checkpoint: bool = False,
    is_loaded: bool = False,
    pads_alike: bool | None = None,
    has_template: bool = True,
    trained_length: int | None = None,
) -> ScoringContract:
    """`sign_folder` of a model that was exported with `renderer`; every process of `mesh` calls it.

    The golden scores are of the weights in memory. Of a checkpoint only the head is hashed, because
    all tensors take about a second per GB, and weights that give no finite score are signed with a
    warning. `heads`: None for a model whose score is its only value, or their sum. `step_score`:
    how a process reward model makes its score. `is_loaded`: the model was loaded from the folder.
    `pads_alike`: config.json and tokenizer have one padding token; None: they are compared.
    `has_template`: the folder has a chat template.
    """
    stored = StoredModel(folder)
    # The main process has written the folder, which may show late to others.
    stored.config = processes.on_main(lambda: stored.config)
    heads = list(heads or _default_heads(model))
    steps = None
    if model.step_token is not None:
        steps = StepsContract(token=model.step_token, score=step_score)
    if pads_alike is None:
        pads_alike = stored.pad_token_id == renderer.tokenizer.pad_token_id
    saved_dtype = None
    if not is_loaded:
        saved_dtype = DTYPES[stored.config_dtype or "float32"]
    with _as_saved(model, saved_dtype, mesh, computed=torch.float32) as exact:
        golden = _golden(exact, renderer, heads, steps, may_be_broken=is_checkpoint)
    token_ids = [example.token_ids for example in golden]
    scores = [example.score for example in golden]
    # Scored again in bfloat16: how far these are off says how much the model amplifies rounding.
    with _as_saved(model, saved_dtype, mesh, computed=torch.bfloat16) as rounded:
        rounded_scores = [score_of(row, heads, steps) for row in values_of(rounded, token_ids)]

    def sign() -> ScoringContract:
        backbone, head = stored.split(stored_heads(model.hf))
        weights_dtype = dtype_of(backbone)
        contract = ScoringContract(
            treeward_version=VERSION,
            rendering=_rendering_contract(
                renderer,
                token_ids,
                pad_token_id=stored.pad_token_id,
                has_template=has_template,
                trained_length=trained_length,
            ),
            read=ReadContract(
                position=model.read_position,
                plain_transformers=pads_alike and _is_read_alike(model, stored, token_ids),
                token=renderer.read_token,
            ),
            dtypes=DtypeContract(
                weights=weights_dtype,
                head=dtype_of(head),
                config=stored.config_dtype or weights_dtype,
            ),
            heads=heads,
            steps=steps,
            problem_type=stored.config.get("problem_type"),
            weights=WeightsContract(
                architecture=type(model.hf).__name__,
                num_parameters=stored.num_parameters,
                num_tensors=len(stored.tensors),
                shapes_sha256=stored.shapes_sha256,
                head_sha256=sha256_of(head),
                config=architecture_of(stored.config),
            ),
            golden=golden,
            tolerance=measured_tolerance(scores, rounded_scores),
            readme_sha256=readme_sha256(folder),
        )
        if not is_checkpoint:
            contract = _with_hashes(contract, stored)
        write_contract(contract, folder)
        return contract

    return processes.on_main(sign)


def _rendering_contract(
    renderer: Renderer,
    token_ids: Sequence[Sequence[int]],
    *,
    pad_token_id: int | None,
    has_template: bool,
    trained_length: int | None,
) -> RenderingContract:
    """How conversations become tokens. `token_ids`: those of the golden conversations."""
    tokenizer = renderer.tokenizer
    bos = tokenizer.bos_token_id
    frame: Literal["none", "bos", "cls_sep"] = "none"
    if renderer.kind == "encoder":
        frame = "cls_sep"
    elif token_ids and all(row[0] == bos for row in token_ids):
        frame = "bos"
    # A limit that drops conversations is no part of a score; one that cuts them is.
    max_length = None
    if renderer.truncation == "truncate_left":
        max_length = renderer.max_length
    return RenderingContract(
        chat_template_sha256=text_sha256(renderer.chat_template),
        chat_template=renderer.chat_template,
        template_in_folder=has_template,
        chat_template_kwargs=renderer.chat_template_kwargs,
        max_length=max_length,
        trained_length=trained_length or renderer.max_length,
        truncation=renderer.truncation,
        frame=frame,
        num_bos=renderer.num_bos,
        bos_token_id=bos,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad_token_id,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
    )


def _is_read_alike(
    model: RewardModel,
    stored: StoredModel,
    token_ids: Sequence[Sequence[int]],
) -> bool:
    """Whether plain transformers reads the golden conversations where treeward does."""
    if not token_ids:
        return False  # there is nothing to tell it by
    if getattr(model.hf, "made_by_treeward", False):
        return False  # transformers has no class for such a model
    if model.read_position != "last token":
        return True
    # transformers reads before the padding, and takes an end that is the padding token for it.
    return all(row[-1] != stored.pad_token_id for row in token_ids)


def hash_all(folder: Path, renderer: Renderer, max_positions: int | None) -> None:
    """Add the hashes of all tensors to a contract that was signed as a checkpoint's.

    Raises `ModelError` where that left out golden conversations without a finite score.
    """
    contract = read_contract(folder)
    assert contract is not None
    signed = {example.name for example in contract.golden}
    broken = _rendered(renderer, max_positions, contract.steps).keys() - signed
    if broken:
        raise ModelError(
            "the model gives no finite score to golden conversations",
            where=str(folder),
            got=", ".join(sorted(broken)),
            fix="export an earlier checkpoint",
        )
    contract = _with_hashes(contract, StoredModel(folder))
    # README.md may have been written since.
    contract = contract.model_copy(update={"readme_sha256": readme_sha256(folder)})
    write_contract(contract, folder)


def _with_hashes(contract: ScoringContract, stored: StoredModel) -> ScoringContract:
    """The contract with the fields of its weights that need the bytes of all tensors."""
    hashes = {tensor.name: sha256_of([tensor]) for tensor in stored.tensors}
    fields = {
        "sha256": text_sha256(json.dumps(sorted(hashes.items()))),
        "tensors": {name: digest[:HASH_DIGITS] for name, digest in hashes.items()},
    }
    weights = contract.weights.model_copy(update=fields)
    return contract.model_copy(update={"weights": weights})


@contextlib.contextmanager
def _as_saved(
    model: RewardModel,
    saved: torch.dtype | None,
    mesh: Mesh = _ALONE,
    computed: torch.dtype = torch.float32,
) -> Iterator[RewardModel]:
    """The model that a folder holds which has the weights of `model` in the dtype `saved`.

    It is the model itself where that computes the same (`saved` is None: it was loaded from there),
    and else a copy with merged adapters and rounded weights, sharded as the model is.
    """
    is_sharded = mesh.devices is not None
    dtypes = {parameter.dtype for parameter in model.weights()}
    is_changed = is_sharded or has_adapters(model) or dtypes != {saved}
    if saved is None or not is_changed:
        with exact_scoring(model), model.computing_in(computed):
            yield model
        return
    device = None  # a sharded copy lies where the model's parts do
    if not is_sharded:
        # 4 bytes a number in float32, 2 in bfloat16 for the tolerance, and some room.
        num_bytes = 7 * model.hf.num_parameters()
        device = model.device if has_room(model.device, num_bytes) else torch.device("cpu")
    copied = plain_copy(model, mesh, saved=saved, computed=computed, device=device)
    with exact_scoring(copied):
        yield copied
    del copied
    gc.collect()  # FSDP's hooks hold its modules in cycles


@contextlib.contextmanager
def exact_scoring(model: RewardModel) -> Iterator[None]:
    """Within it the model scores in the dtype of its weights, without rounding of products.

    Float32 products are not rounded to TF32 or bfloat16, whatever `policy.matmul_precision` is.
    Afterwards the model trains or scores as before.
    """
    was_training = model.training
    # The counters are of what the run or the user has scored.
    num_computed_tokens = model.num_computed_tokens
    num_row_tokens = model.num_row_tokens
    common = torch.get_float32_matmul_precision()
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv)
    # Each product has a setting of its own, which may be to follow the common one.
    precisions = [product.fp32_precision for product in products]
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
        model.num_computed_tokens = num_computed_tokens
        model.num_row_tokens = num_row_tokens


def _labels(model: RewardModel) -> list[str]:
    config: Any = model.hf.config
    if model.score_parts:
        return list(model.score_parts)
    return [str(config.id2label.get(i, f"head {i}")) for i in range(model.num_heads)]


def _default_heads(model: RewardModel) -> list[HeadContract]:
    if model.step_token is not None:
        return [HeadContract(meaning=STEPS_MEANING)]
    if model.score_parts:
        meaning = "its share of the score"
        return [HeadContract(name=name, meaning=meaning) for name in model.score_parts]
    if model.num_heads > 1:
        command = "treeward verify MODEL --write --head-weights NAME=1,..."
        raise ConfigError(
            "the model has several labels, and nothing says how they make one score",
            got=", ".join(_labels(model)),
            fix=f"{command} writes a contract that does",
        )
    return [HeadContract()]


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary, the merges and the special tokens.

    Other rules of ids (normalisation, splitting) show in the golden conversations. The hash does
    not depend on how a version of `tokenizers` writes its files.
    """
    merges: list[list[str]] = []
    scores: list[Any] | None = None
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        for pair in model.get("merges") or []:
            # Older versions write "a b" for a pair, newer ones ["a", "b"].
            if isinstance(pair, str):
                pair = pair.split(" ")
            merges.append(list(pair))
        if isinstance(model.get("vocab"), list):  # a unigram model: tokens with log-probabilities
            scores = model["vocab"]
    special: dict[str, str] = {}
    for kind in ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token"):
        token = getattr(tokenizer, kind, None)
        if token is not None:
            special[kind] = str(token)
    vocabulary = dict(tokenizer.get_vocab())
    vocabulary.pop(PAD_TOKEN, None)  # loading a model may add it
    parts = {"vocabulary": vocabulary, "merges": merges, "scores": scores, "special": special}
    return text_sha256(json.dumps(parts, sort_keys=True))


def golden_spreads(
    model: RewardModel, reader: SpreadReader, token_ids: Sequence[TokenIds]
) -> list[float]:
    """The spread of each of these conversations."""
    with model.reading(reader):
        spreads: list[float] = model.read_tokens(token_ids)[:, -1].tolist()
    return spreads


def measured_tolerance(exact: Sequence[float], rounded: Sequence[float]) -> ToleranceContract:
    """How far numbers of this model may be off, by how far the golden ones are off in bfloat16
    (`rounded`).

    bfloat16 keeps 8 bits of a number and float32 24, so rounding is 2^16 times coarser, and a model
    amplifies both alike; 2^8 of it are left to other orders of summation, and to other
    conversations than these ten.
    """
    off = [abs(a - b) for a, b in zip(rounded, exact, strict=True)]
    worst = max(filter(math.isfinite, off), default=0.0)
    largest = max(map(abs, exact), default=1.0)
    # The floors are for numbers that happen to round well: a share of the largest, and a number.
    # Rounding to bfloat16 alone changes a number by up to 2^-8 of it: the share is four of these.
    return ToleranceContract(
        float32=max(worst / 256, 1e-5 * largest, 1e-7),
        bfloat16=max(8 * worst, 2**-6 * largest, 1e-5),
    )


def _golden(
    model: RewardModel,
    renderer: Renderer,
    heads: Sequence[HeadContract],
    steps: StepsContract | None,
    *,
    may_be_broken: bool,
) -> list[GoldenExample]:
    """The golden conversations that the template and the limits allow, with their scores."""
    conversations = _rendered(renderer, model.max_positions, steps)
    rendered = {name: ids for name, (_, ids) in conversations.items()}
    if not rendered:
        logger.warning(
            "The chat template or the limit of %s tokens refuses every golden conversation: "
            "the scoring contract has none, so scores cannot be replayed.",
            renderer.max_length,
        )
    bos = None
    if model.layout != "encoder":
        bos = model.hf.config.get_text_config().bos_token_id
    right_values = values_of(model, list(rendered.values()))
    mistaken_ids: list[dict[Mistake, list[int]]] = []
    wrong_rows: list[list[int]] = []
    # All mistakes of all conversations are scored in one call, and dealt out below in this order.
    for ids in rendered.values():
        by_mistake = dict(_mistaken(ids, bos, model, renderer.adds_bos))
        mistaken_ids.append(by_mistake)
        wrong_rows += by_mistake.values()
    # Whoever makes a mistake reads whatever comes last, so nothing is padding for these.
    padding_token = model.padding_token
    model.padding_token = None
    wrong_values = iter(values_of(model, wrong_rows))
    model.padding_token = padding_token
    examples = []
    for name, by_mistake, values in zip(rendered, mistaken_ids, right_values, strict=True):
        ids = rendered[name]
        # Before a broken conversation is left out: its mistakes are among the wrong values too.
        mistakes: dict[Mistake, float] = {}
        for mistake in by_mistake:
            score = score_of(next(wrong_values), heads, steps)
            if math.isfinite(score):
                mistakes[mistake] = score
        if may_be_broken and not all(map(math.isfinite, values)):
            continue
        check_finite(values, f"the golden conversation {name!r}", len(ids))
        conversation, _ = conversations[name]
        examples.append(
            GoldenExample(
                name=name,
                messages=list(map(dict, conversation)),
                chat_template_kwargs=conversation.template_kwargs,
                token_ids=ids,
                score=score_of(values, heads, steps),
                heads=values,
                mistakes=mistakes,
            )
        )
    if len(examples) < len(rendered):
        logger.warning(
            "The model gives no finite score to %d of %d golden conversations: its weights are "
            "broken.",
            len(rendered) - len(examples),
            len(rendered),
        )
    return examples


def _rendered(
    renderer: Renderer, max_positions: int | None, steps: StepsContract | None
) -> dict[str, tuple[Conversation, list[int]]]:
    """The golden conversations that the template and the limits allow, with their tokens. Those of
    a process reward model have its marks, so that any program can replay them."""
    rendered: dict[str, tuple[Conversation, list[int]]] = {}
    for name, golden in GOLDEN_CONVERSATIONS.items():
        conversation = golden
        if steps is not None:
            conversation = Steps(steps.token, steps.score).marked(golden, name)
        # A template that does not read the tools would make another conversation of it.
        if not all(map(renderer.reads, conversation.template_kwargs)):
            continue
        try:
            fitted = renderer.fit(conversation)
        except DataError:  # the template refuses it
            continue
        if fitted is None:
            continue
        if max_positions is None or len(fitted.token_ids) <= max_positions:
            rendered[name] = (conversation, list(map(int, fitted.token_ids)))
    return rendered


def _mistaken(
    ids: list[int],
    bos: int | None,
    model: RewardModel,
    adds_bos: bool,
) -> Iterator[tuple[Mistake, list[int]]]:
    """The mistakes that can be made with a golden conversation, and the tokens that each reads."""
    if model.layout == "encoder" or len(ids) < 3:
        return  # an encoder has no end to miss, and of two tokens nothing is left
    end = list(model.until_padding(ids))
    if model.step_token is not None:
        pass  # it is read at its marks, wherever the end is
    elif end == ids:
        yield "read_before_end", ids[:-1]
    else:
        yield "read_at_padding", ids
    if bos is None:
        return
    begins_with_bos = end[0] == bos
    if begins_with_bos:
        yield "no_bos", end[1:]
    has_position_left = len(end) < (model.max_positions or math.inf)
    if has_position_left and (adds_bos or begins_with_bos):
        yield "two_bos", [bos, *end]
