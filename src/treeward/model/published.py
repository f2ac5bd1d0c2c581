"""Published reward models with files that plain transformers does not read: one table of adapters.

    adapter = find(config.json as a dictionary, "infly/INF-ORM-Llama3.1-70B")      # None for an ordinary model
    model_class = adapter.reader(config, LlamaForSequenceClassification)            # loads the authors' files

The authors' code never runs: `heads.py` has the arithmetic, from the `source` of each adapter. A
model with a linear head becomes a plain classifier of transformers; another head is a module
`score`, and is saved as its authors save it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from treeward.data.chat_template import NUM_BOS
from treeward.errors import ModelError
from treeward.model.heads import (
    HELPSTEER2,
    NUM_RATINGS,
    Fields,
    GatedObjectives,
    RewardOrCost,
    Standardised,
    StepOdds,
    WeightedAttributes,
    WeightedRatings,
    grm_head,
    mlp,
    objectives,
)


class SplitGroups(ConversionOps):
    """InternLM2's one matrix of queries, keys and values: for each key head its queries, its key
    and its value."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        [tensors], config = input_dict.values(), kwargs["config"]
        weight: Tensor = tensors[0] if isinstance(tensors, list) else tensors
        per_key = config.num_attention_heads // config.num_key_value_heads
        parts = weight.unflatten(0, (config.num_key_value_heads, per_key + 2, -1)).split(
            [per_key, 1, 1], dim=1
        )
        return {
            name: part.flatten(0, 2).contiguous()
            for name, part in zip(target_patterns, parts, strict=True)
        }


def _as_llama(fields: Fields) -> LlamaConfig:
    left_out = {"auto_map", "model_type", "bias", "attn_implementation", "transformers_version"}
    llama_fields = {name: value for name, value in fields.items() if name not in left_out}
    config: LlamaConfig = LlamaConfig(
        **llama_fields | {"attention_bias": fields.get("bias", False)}
    )
    return config


def _then(text: str) -> tuple[str, str]:
    # a literal, whose white space no tag before it removes
    return (
        "",
        f"{{{{ {json.dumps(text)} }}}}" if text else "",
    )


_TEXT, _EOS = "{{ message.content }}", "{{ eos_token }}"


def _turns(user: str, assistant: str, begin: str = "") -> str:
    """A chat template of the two roles that the authors' text has."""
    refusal = "{{ raise_exception('this model knows no role ' + message.role) }}"
    turn = f"{{% if message.role == 'user' %}}{user}{{% elif message.role == 'assistant' %}}{assistant}"
    return f"{begin}{{% for message in messages %}}{turn}{{% else %}}{refusal}{{% endif %}}{{% endfor %}}"


def _at_end_of_text(_: Fields, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text without line ends, and with the end-of-text token, as in OpenRLHF's
    `RewardDataset`."""
    text = "{{ text if text.endswith(eos_token) else text + ' ' + eos_token }}"
    after = "{% endset %}{% set text = text.rstrip('\\n') %}" + text
    return ("{% set text %}", after) if tokenizer.eos_token else ("", "")


def _reward_token(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    token = fields["reward_token_id"]
    text = str(tokenizer.convert_ids_to_tokens(token))
    if (got := tokenizer.encode(text, add_special_tokens=False)) != [token]:
        summary, need = (
            "the tokenizer does not write the token that this model reads",
            f"[{token}] for {text!r}",
        )
        raise ModelError(
            summary,
            field="reward_token_id",
            got=got,
            need=need,
            fix="name the model's own tokenizer",
        )
    return _then(text)


_INTERNLM2: list[WeightRenaming | WeightConverter] = [
    WeightConverter(
        ".attention.wqkv.weight", [f".self_attn.{x}_proj.weight" for x in "qkv"], [SplitGroups()]
    ),
    WeightRenaming("model.tok_embeddings", "model.embed_tokens"),
    WeightRenaming(".attention.wo", ".self_attn.o_proj"),
    WeightRenaming(".feed_forward.w1", ".mlp.gate_proj"),
    WeightRenaming(".feed_forward.w2", ".mlp.down_proj"),
    WeightRenaming(".feed_forward.w3", ".mlp.up_proj"),
    WeightRenaming(".attention_norm", ".input_layernorm"),
    WeightRenaming(".ffn_norm", ".post_attention_layernorm"),
]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A kind of published model.

    `source`: of the arithmetic. `recognises`: by config.json and the name. `stored`: the head's
    modules in the checkpoint, and our names for them. `backbone`: other changes of names and
    tensors. `head`: makes the module `score`; None for a linear one. `parts`: names of its values,
    whose sum is the score. `config`: from config.json, for unknown model types. `tokens`: the score
    is the logit of the last of these, minus that of the one before. `step_token`: it is read after
    each step, at this token. `template`: for a tokenizer without one, the text that the authors
    score. `reads_plain_text`: their code tokenizes the template's text like any other, and adds a
    BOS to one that it has. `end`: texts before and after the chat template. `architecture`: of
    config.json, where the authors' says too little. `keys`: of config.json for the authors' code
    alone.
    """

    source: str
    recognises: Callable[[Fields, str], bool]
    stored: Callable[[Fields], Mapping[str, str]] = lambda _: {}
    backbone: Sequence[WeightRenaming | WeightConverter] = ()
    head: Callable[[PreTrainedConfig], nn.Module] | None = None
    parts: Callable[[Fields], tuple[str, ...]] = lambda _: ()
    config: Callable[[Fields], PreTrainedConfig] | None = None
    tokens: Callable[[Fields], Sequence[str | int]] | None = None
    step_token: str | None = None
    template: str | None = None
    reads_plain_text: bool = False
    end: Callable[[Fields, PreTrainedTokenizerBase], tuple[str, str]] = lambda _, __: ("", "")
    architecture: str | None = None
    keys: tuple[str, ...] = ()

    def reader(
        self, config: PreTrainedConfig, plain: type[PreTrainedModel]
    ) -> type[PreTrainedModel]:
        """A subclass of the family's classifier with the authors' architecture, which loads their
        files."""
        head, fields = self.head, config.to_dict()
        if not (parts := self.parts(fields)):
            config.num_labels = 1
        if self.tokens is not None:
            return plain
        stored = self.stored(fields)

        def make(hf: Any, config: PreTrainedConfig) -> None:
            plain.__init__(hf, config)
            if head is not None:
                hf.score = head(config)

        name = self.architecture or (config.architectures or [plain.__name__])[0]
        if hasattr(transformers, name):  # whose own files are not to be renamed
            name = f"Published{name}"
        body = {"__init__": make, "__module__": plain.__module__, "plain_class": plain}
        stored_head = tuple(old.split(".")[0] for old in stored)
        body |= {
            "stored_head": stored_head,
            "score_parts": parts,
            "made_by_treeward": head is not None,
        }
        body["step_token"] = self.step_token
        made: type[PreTrainedModel] = type(name, (plain,), body)
        renamings = [WeightRenaming(f"^{old}", new) for old, new in stored.items() if old != new]
        register_checkpoint_conversion_mapping(name, [*renamings, *self.backbone], overwrite=True)
        return made

    def stored_name(self, config: PreTrainedConfig, name: str) -> str:
        """The name in the checkpoint of a tensor of our head."""
        for stored_prefix, prefix in self.stored(config.to_dict()).items():
            if f"{name}.".startswith(f"{prefix}."):
                return stored_prefix + name.removeprefix(prefix)
        return name

    def settle(self, hf: Any) -> None:
        """Turn a loaded model with a linear head into a plain classifier."""
        vars(hf.config).pop("auto_map", None)  # names files of code that are not saved with it
        if self.head is not None:
            return
        hf.__class__ = getattr(hf, "plain_class", type(hf))
        vars(hf).pop("_weight_conversions", None)
        hf.config.architectures = [type(hf).__name__]
        for key in self.keys:
            vars(hf.config).pop(key, None)

    def of_tokens(
        self,
        plain: type[PreTrainedModel],
        config: PreTrainedConfig,
        lm: Any,
        tokenizer: PreTrainedTokenizerBase,
    ) -> PreTrainedModel:
        """The classifier whose value is a logit of a language model, or the difference of two:
        their log-odds."""
        assert self.tokens is not None
        tokens = self.tokens(config.to_dict())
        vocabulary, head, text = (
            tokenizer.get_vocab(),
            lm.get_output_embeddings(),
            config.get_text_config(),
        )
        ids = [vocabulary.get(token) if isinstance(token, str) else token for token in tokens]
        if None in ids or len(ids) > 2:
            need = "one token, or two: the one against the score and the one for it, as the vocabulary writes them"
            raise ModelError(
                "these are no tokens", where="config.json", field=TOKENS_KEY, got=tokens, need=need
            )
        scalings = ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if head.bias is not None or any(getattr(text, name, None) for name in scalings):
            got, need = type(lm).__name__, "logits without a bias, a cap and a scale"
            raise ModelError(
                "the logits of this model are not linear", where=lm.name_or_path, got=got, need=need
            )
        with torch.device("meta"):
            hf: Any = plain._from_config(config, dtype=torch.float32, attn_implementation="eager")
        setattr(hf, hf.base_model_prefix, lm.base_model)
        rows = head.weight.detach()[ids].float()
        hf.score.weight = nn.Parameter(rows[-1:] - rows[:-1] if len(ids) == 2 else rows)
        hf.name_or_path = lm.name_or_path
        return hf.eval()  # type: ignore[no-any-return]


TOKENS_KEY, PROMPT_KEY = "classifier_from_token", "classifier_prompt"
"""Keys that make a reward model of any language model: the first is vLLM's, `[false, true]` or one
token; the second is the text that follows the last message."""

_HUB = "https://huggingface.co/"
_OPENRLHF = "https://github.com/OpenRLHF/OpenRLHF/blob/3c3be6234e0cb353e76bb8019947db9dfe99fca7/openrlhf/models/model.py"
_BENCH = "https://github.com/allenai/reward-bench/blob/05a9005efb607249822c193590c8ecab87c77052/rewardbench/models/"


def _is(*architectures: str, called: str = r"(?!)") -> Callable[[Fields, str], bool]:
    """`called`: a pattern for the name of a model whose config.json may not name its class."""
    return lambda fields, name: bool(
        {*architectures} & {*(fields.get("architectures") or ())} or re.search(called, name)
    )


def _is_openrlhf(*, normalised: bool) -> Callable[[Fields, str], bool]:
    def recognises(fields: Fields, name: str) -> bool:
        is_plain = any(
            "Classification" in architecture for architecture in fields.get("architectures") or ()
        )
        is_openrlhf = _is("RewardModel")(fields, name) or (
            "value_head_prefix" in fields and not is_plain
        )
        return is_openrlhf and normalised == (
            bool(fields.get("normalize_reward")) and fields.get("std") is not None
        )

    return recognises


def _is_grm(fields: Fields, name: str) -> bool:
    # the newer ones
    is_plain = "Classification" in str(fields.get("architectures")) and "auto_map" not in fields
    has_keys = "vhead_layer_type" in fields and not is_plain
    return has_keys or _is("GRewardModel", called=r"GRM-[^/]*-sftreg[^/]*$")(fields, name)


def _writes(fields: Fields) -> bool:
    return any(name.endswith("ForCausalLM") for name in fields.get("architectures") or ())


ADAPTERS: Mapping[str, Adapter] = {
    "OpenRLHF": Adapter(
        source=_OPENRLHF,
        recognises=_is_openrlhf(normalised=False),
        stored=lambda fields: {fields.get("value_head_prefix") or "score": "score"},
        end=_at_end_of_text,
        keys=("value_head_prefix", "mean", "std", "normalize_reward"),
    ),
    "OpenRLHF, normalised": Adapter(
        source=_OPENRLHF,
        recognises=_is_openrlhf(normalised=True),
        stored=lambda fields: {fields.get("value_head_prefix") or "score": "score.value"},
        head=Standardised,
        end=_at_end_of_text,
    ),
    "INF-ORM, Qwen2.5-Math-RM": Adapter(
        source=f"{_BENCH}inform.py",
        recognises=_is("INFORMForSequenceClassification", "Qwen2ForRewardModel"),
        stored=lambda _: {"score": "score"},
        head=lambda config: mlp([config.hidden_size, config.hidden_size, 1], nn.ReLU),
    ),
    "Qwen2.5-Math-PRM": Adapter(
        source=f"{_HUB}Qwen/Qwen2.5-Math-PRM-7B",
        recognises=_is("Qwen2ForProcessRewardModel"),
        stored=lambda _: {"score": "score"},
        head=StepOdds,
        step_token="<extra_0>",
    ),
    "InternLM2-Reward": Adapter(
        source=f"{_HUB}internlm/internlm2-20b-reward/blob/6539b1df85e74019a3e36da43901e18205c572ea/modeling_internlm2.py",
        recognises=_is("InternLM2ForRewardModel"),
        stored=lambda _: {"v_head": "score"},
        backbone=_INTERNLM2,
        config=_as_llama,
        end=_reward_token,
        keys=("reward_token_id",),
    ),
    "GRM": Adapter(
        source=f"{_BENCH}grm.py",
        recognises=_is_grm,
        stored=lambda _: {"v_head.summary": "score"},
        head=grm_head,
        reads_plain_text=True,
        architecture="GRewardModel",
    ),
    "Eurus-RM": Adapter(
        source=f"{_HUB}openbmb/Eurus-RM-7b",
        recognises=_is("EurusRewardModel"),
        stored=lambda _: {"regression_head": "score"},
        template=_turns(
            f"[INST] {_TEXT} [/INST]", f" {_TEXT}{{{{ '' if loop.last else eos_token }}}}"
        ),
    ),
    "UltraRM": Adapter(
        source=f"{_BENCH}openbmb.py",
        recognises=_is("LlamaRewardModel", called=r"UltraRM-13b$"),
        stored=lambda _: {"regression_head": "score"},
        template=_turns(
            f"Human: {_TEXT}\n", f"Assistant: {_TEXT}{{{{ '' if loop.last else '\\n' }}}}"
        ),
    ),
    "Beaver": Adapter(
        source=f"{_BENCH}beaver.py",
        recognises=_is("LlamaForScore", "LlamaModelForScore"),
        stored=lambda _: {"score_head": "score.value", "normalizer": "score.normalizer"},
        head=RewardOrCost,
        template=_turns(
            f"USER: {_TEXT} ASSISTANT:", f"{_TEXT}{_EOS}", "BEGINNING OF CONVERSATION: "
        ),
    ),
    "Starling-RM": Adapter(
        source=f"{_BENCH}starling.py",
        recognises=_is(called=r"Starling-RM-(7B-alpha|34B)$"),
        stored=lambda _: {"v_head": "score"},
        backbone=[WeightRenaming(r"^transformer\.", "model.")],
        template=_turns(f"{{{{ bos_token }}}}[INST] {_TEXT} {_EOS} [/INST]", f" {_TEXT}{_EOS}"),
    ),
    "LDL-Reward": Adapter(
        source=f"{_BENCH}ldlreward.py",
        recognises=_is("LDLRewardModel27B", called=r"(LDL|Lenovo)-Reward-[^/]*$"),
        stored=lambda _: {name: f"score.{name}" for name in ("regression_layer", "gating_layer")},
        head=WeightedRatings,
        parts=lambda fields: tuple(
            f"objective {i}" for i in range(fields["num_objectives"] // NUM_RATINGS)
        ),
        config=lambda fields: (
            AutoConfig.for_model(  # which drops `temperature`, as one of generation
                **{
                    "num_objectives": 220,
                    "softmax": False,
                    "gating_temperature": fields.get("temperature", 1.0),
                    **fields,
                }
            )
        ),
        architecture="LDLRewardModel27B",
    ),
    "URM": Adapter(
        source="https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/models/llama_classification.py",
        recognises=_is("LlamaForSequenceClassificationWithNormal_Weights"),
        stored=lambda _: {"score": "score.attributes", "weights": "score.weights"},
        head=WeightedAttributes,
        parts=lambda _: HELPSTEER2,
        reads_plain_text=True,
    ),
    "ArmoRM, QRM": Adapter(
        source=f"{_BENCH}qrm.py",
        recognises=lambda fields, _: any(
            re.fullmatch(r"\w+ForRewardModelWithGating\d*", name)
            for name in fields.get("architectures") or ()
        ),
        stored=lambda _: {
            name: f"score.{name}"
            for name in ("regression_layer", "reward_transform_matrix", "gating")
        },
        head=GatedObjectives,
        parts=objectives,
    ),
    "Nemotron-Reward": Adapter(
        source=f"{_HUB}nvidia/Llama-3.1-Nemotron-70B-Reward-HF",
        recognises=lambda fields, name: (
            _writes(fields) and bool(re.search(r"Nemotron-\d+B-Reward[^/]*$", name))
        ),
        tokens=lambda _: [0],
    ),
    "a token of a language model": Adapter(
        source="https://docs.vllm.ai/en/latest/models/pooling_models/",
        recognises=lambda fields, _: _writes(fields) and bool(fields.get(TOKENS_KEY)),
        tokens=lambda fields: fields[TOKENS_KEY],
        end=lambda fields, _: _then(str(fields.get(PROMPT_KEY) or "")),
        keys=(TOKENS_KEY, PROMPT_KEY),
    ),
}
"""The first adapter that recognises a model is used."""


def find(fields: Fields, name: str | None) -> Adapter | None:
    """The adapter for a model with this config.json and this name; None for an ordinary model."""
    return next(
        (adapter for adapter in ADAPTERS.values() if adapter.recognises(fields, name or "")), None
    )


def refuse(fields: Fields, name: str | None) -> None:
    """Raise `ModelError` for a published model that has no score of a completion."""
    architectures = " ".join(fields.get("architectures") or ())
    steps, pairs = r"For(Process|PRM|Prm|TokenClassification)", r"\bGPM-[^/]*$"
    for text, pattern, summary in (
        (
            architectures,
            rf"\b(?!Qwen2ForProcess)\w+{steps}\w*",
            "this process reward model is not known",
        ),
        (
            name or "",
            pairs,
            "a general preference model compares pairs: its values of one completion are no score",
        ),
    ):
        if match := re.search(pattern, text):
            fix = "use its authors' code, or a model that docs/reward_models.md lists"
            raise ModelError(
                summary, where=name, got=match[0], need="one value of a conversation", fix=fix
            )


def set_template(tokenizer: PreTrainedTokenizerBase, fields: Fields, name: str) -> None:
    """Give a tokenizer without a chat template the authors', end the template as the model expects,
    and note in the tokenizer how many BOS the conversations of its model's training began with.
    Raises `ModelError` where the end needs a template."""
    adapter = find(fields, name)
    before, after = adapter.end(fields, tokenizer) if adapter else ("", "")
    tokenizer.chat_template = tokenizer.chat_template or (adapter.template if adapter else None)
    template = tokenizer.chat_template
    if after and not isinstance(template, str):
        got, need = "several chat templates" if template else "no chat template", "one template"
        raise ModelError(
            "this model reads its score after a text that only a chat template can write",
            where=name,
            got=got,
            need=need,
        )
    if isinstance(template, str) and not template.endswith(after):
        # Jinja drops that line's end too
        tokenizer.chat_template = before + template.removesuffix("\n") + after
    is_reward_model = adapter is not None or "SequenceClassification" in str(
        fields.get("architectures")
    )
    if is_reward_model and (num_bos := _num_bos(tokenizer, fields, adapter)) is not None:
        tokenizer.init_kwargs.setdefault(NUM_BOS, num_bos)


def _num_bos(
    tokenizer: PreTrainedTokenizerBase, fields: Fields, adapter: Adapter | None
) -> int | None:
    """How many BOS the conversations of another's training began with, where the tokenizer adds one
    to any text; None where it adds none, and without a template. Most trainers (open-instruct, TRL,
    OpenRLHF) take the template's text as it is, with its BOS or without."""
    bos = tokenizer.bos_token_id
    if (
        bos is None
        or tokenizer.cls_token_id is not None
        or tokenizer("a probe")["input_ids"][:1] != [bos]
    ):
        return None
    probe = [{"role": "user", "content": "Quo vadis?"}, {"role": "assistant", "content": "Romam."}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:  # a template is a program: it can raise anything
        return None
    has_grm_keys = "vhead_layer_type" in fields  # those of plain classifiers too
    reads_plain_text = adapter is not None and (
        adapter.reads_plain_text or adapter.template is not None
    )
    return len(list(takewhile(lambda token: token == bos, ids))) + int(
        reads_plain_text or has_grm_keys
    )
