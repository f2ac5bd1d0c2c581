"""Published reward models with files that plain transformers does not read: one table of adapters.

    fields = json.loads(Path("config.json").read_text())
    adapter = find(fields, "infly/INF-ORM-Llama3.1-70B")        # None for an ordinary model
    adapter.reader(config, LlamaForSequenceClassification)      # a class that loads their files

The authors' code never runs: `heads.py` has the arithmetic, from the `source` of each adapter. A
model with a linear head becomes a plain classifier of transformers; another head is a module
`score`, and is saved as its authors save it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from treeward.data.chat_template import NUM_BOS
from treeward.errors import ModelError
from treeward.model import internlm2
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
    objectives,
    two_layer_head,
)


def _then(text: str) -> tuple[str, str]:
    """`Adapter.end` for a text after the template."""
    if not text:
        return "", ""
    # A literal: the template's own tags before it may remove white space that follows them. With
    # its own characters: Jinja reads JSON's escape of an emoji as two halves of one.
    return "", f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"


_TEXT, _EOS = "{{ message.content }}", "{{ eos_token }}"


def _turns(user: str, assistant: str, begin: str = "") -> str:
    """A chat template of the two roles that the authors' text has."""
    parts = (
        begin,
        "{% for message in messages %}",
        "{% if message.role == 'user' %}",
        user,
        "{% elif message.role == 'assistant' %}",
        assistant,
        "{% else %}",
        "{{ raise_exception('this model knows no role ' + message.role) }}",
        "{% endif %}",
        "{% endfor %}",
    )
    return "".join(parts)


def _at_end_of_text(_: Fields, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text without line ends, and with the end-of-text token, as in OpenRLHF's
    `RewardDataset`."""
    if not tokenizer.eos_token:
        return "", ""
    text = "{{ text if text.endswith(eos_token) else text + ' ' + eos_token }}"
    return "{% set text %}", "{% endset %}{% set text = text.rstrip('\\n') %}" + text


def _reward_token(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text with the token at which InternLM2 is read, which the authors' `get_score` appends
    as an id."""
    token = fields["reward_token_id"]
    text = str(tokenizer.convert_ids_to_tokens(token))
    ids = tokenizer.encode(text, add_special_tokens=False)
    if ids != [token]:
        raise ModelError(
            "the tokenizer does not write the token that this model reads",
            field="reward_token_id",
            got=ids,
            need=f"[{token}] for {text!r}",
            fix="name the model's own tokenizer",
        )
    return _then(text)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A kind of published model.

    `source`: of the arithmetic. `recognises`: by config.json and the name. `stored`: the head's
    modules in the checkpoint, and our names for them; `head_key`: a key of config.json with another
    name for its module `score`. `backbone`: other changes of names and tensors. `head`: makes the
    module `score`; None for a linear one. `parts`: names of its values, whose sum is the score.
    `config`: from config.json, for unknown model types. `tokens`: the score is the logit of the
    last of these, minus that of the one before. `step_token`: it is read after each step, at this
    token. `template`: for a tokenizer without one, the text that the authors score.
    `reads_plain_text`: their code tokenizes the template's text like any other, and adds a BOS to
    one that it has. `end`: texts before and after the chat template. `architecture`: of
    config.json, where the authors' says too little. `keys`: of config.json for the authors' code
    alone.
    """

    source: str
    recognises: Callable[[Fields, str], bool]
    stored: Mapping[str, str] = field(default_factory=dict)
    head_key: str | None = None
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
        head = self.head
        fields = config.to_dict()
        parts = self.parts(fields)
        if not parts:
            config.num_labels = 1
        if self.tokens is not None:
            return plain
        stored = self._stored(fields)

        def make(hf: Any, config: PreTrainedConfig) -> None:
            plain.__init__(hf, config)
            if head is not None:
                hf.score = head(config)

        name = self.architecture or (config.architectures or [plain.__name__])[0]
        # transformers looks conversions up by the class's name: those of its own class stay.
        if hasattr(transformers, name):
            name = f"Published{name}"
        body = {
            "__init__": make,
            "__module__": plain.__module__,
            "plain_class": plain,
            "stored_head": tuple(old.split(".")[0] for old in stored),
            "score_parts": parts,
            "made_by_treeward": head is not None,
            "step_token": self.step_token,
        }
        made: type[PreTrainedModel] = type(name, (plain,), body)
        renamings = [WeightRenaming(f"^{old}", new) for old, new in stored.items() if old != new]
        # `overwrite`: another model of the class may have been loaded before.
        register_checkpoint_conversion_mapping(name, [*renamings, *self.backbone], overwrite=True)
        return made

    def _stored(self, fields: Fields) -> dict[str, str]:
        stored = dict(self.stored)
        name = fields.get(self.head_key) if self.head_key is not None else None
        if name:
            stored[name] = stored.pop("score")
        return stored

    def stored_name(self, config: PreTrainedConfig, name: str) -> str:
        """The name in the checkpoint of a tensor of our head."""
        for stored_prefix, prefix in self._stored(config.to_dict()).items():
            if f"{name}.".startswith(f"{prefix}."):
                return stored_prefix + name.removeprefix(prefix)
        return name

    def settle(self, hf: Any) -> None:
        """Turn a loaded model with a linear head into a plain classifier."""
        vars(hf.config).pop("auto_map", None)  # names files of code that are not saved with it
        if self.head is not None:
            return
        # Its tensors are the plain class's now, so that its export needs no adapter.
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
        vocabulary = tokenizer.get_vocab()
        ids: list[int | None] = []
        for token in tokens:
            ids.append(vocabulary.get(token) if isinstance(token, str) else token)
        if None in ids or len(ids) > 2:
            raise ModelError(
                "these are no tokens",
                where="config.json",
                field=TOKENS_KEY,
                got=tokens,
                need="one token, or two: the one against the score and the one for it, as the "
                "vocabulary writes them",
            )
        head = lm.get_output_embeddings()
        text_config = config.get_text_config()
        scalings = ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if head.bias is not None or any(getattr(text_config, name, None) for name in scalings):
            raise ModelError(
                "the logits of this model are not linear",
                where=lm.name_or_path,
                got=type(lm).__name__,
                need="logits without a bias, a cap and a scale",
            )
        with torch.device("meta"):
            hf: Any = plain._from_config(config, dtype=torch.float32, attn_implementation="eager")
        setattr(hf, hf.base_model_prefix, lm.base_model)
        weight = head.weight.detach()[ids].float()
        if len(ids) == 2:
            # The difference of two logits is a logit of the difference of their rows.
            weight = weight[1:] - weight[:1]
        # The value of the head at the last token is the logit of the token after it.
        hf.score.weight = nn.Parameter(weight)
        hf.name_or_path = lm.name_or_path
        return hf.eval()  # type: ignore[no-any-return]


TOKENS_KEY, PROMPT_KEY = "classifier_from_token", "classifier_prompt"
"""Keys that make a reward model of any language model: the first is vLLM's, `[false, true]` or one
token; the second is the text that follows the last message."""

_HUB = "https://huggingface.co/"
_OPENRLHF = (
    "https://github.com/OpenRLHF/OpenRLHF/blob/3c3be6234e0cb353e76bb8019947db9dfe99fca7/"
    "openrlhf/models/model.py"
)
_BENCH = (
    "https://github.com/allenai/reward-bench/blob/05a9005efb607249822c193590c8ecab87c77052/"
    "rewardbench/models/"
)


def _architectures(fields: Fields) -> Sequence[str]:
    return fields.get("architectures") or ()


def _is(*architectures: str, called: str = r"(?!)") -> Callable[[Fields, str], bool]:
    """`called`: a pattern for the name of a model whose config.json may not name its class; the
    default matches none."""

    def recognises(fields: Fields, name: str) -> bool:
        if not set(architectures).isdisjoint(_architectures(fields)):
            return True
        return re.search(called, name) is not None

    return recognises


def _is_openrlhf(*, normalised: bool) -> Callable[[Fields, str], bool]:
    def recognises(fields: Fields, name: str) -> bool:
        # A plain classifier may have kept the key.
        is_plain = any("Classification" in text for text in _architectures(fields))
        has_key = "value_head_prefix" in fields and not is_plain
        normalises = bool(fields.get("normalize_reward")) and fields.get("std") is not None
        is_openrlhf = has_key or _is("RewardModel")(fields, name)
        return is_openrlhf and normalises == normalised

    return recognises


def _is_grm(fields: Fields, name: str) -> bool:
    if _is("GRewardModel", called=r"GRM-[^/]*-sftreg[^/]*$")(fields, name):
        return True
    # Newer ones name a plain classifier, whose code is their own.
    is_plain = "Classification" in str(fields.get("architectures")) and "auto_map" not in fields
    return "vhead_layer_type" in fields and not is_plain


def _has_gate(fields: Fields, _: str) -> bool:
    names = _architectures(fields)
    return any(re.fullmatch(r"\w+ForRewardModelWithGating\d*", name) for name in names)


def _is_nemotron(fields: Fields, name: str) -> bool:
    return _writes(fields) and re.search(r"Nemotron-\d+B-Reward[^/]*$", name) is not None


def _names_tokens(fields: Fields, _: str) -> bool:
    return _writes(fields) and bool(fields.get(TOKENS_KEY))


def _writes(fields: Fields) -> bool:
    return any(name.endswith("ForCausalLM") for name in _architectures(fields))


def _ldl_objectives(fields: Fields) -> tuple[str, ...]:
    return tuple(f"objective {i}" for i in range(fields["num_objectives"] // NUM_RATINGS))


def _ldl_config(fields: Fields) -> PreTrainedConfig:
    """The defaults are those of the authors' class. transformers takes `temperature` for one of
    generation and drops it."""
    defaults = {
        "num_objectives": 220,
        "softmax": False,
        "gating_temperature": fields.get("temperature", 1.0),
    }
    return AutoConfig.for_model(**{**defaults, **fields})


def _prompt_at_end(fields: Fields, _: PreTrainedTokenizerBase) -> tuple[str, str]:
    return _then(str(fields.get(PROMPT_KEY) or ""))


ADAPTERS: Mapping[str, Adapter] = {
    "OpenRLHF": Adapter(
        source=_OPENRLHF,
        recognises=_is_openrlhf(normalised=False),
        stored={"score": "score"},
        head_key="value_head_prefix",
        end=_at_end_of_text,
        keys=("value_head_prefix", "mean", "std", "normalize_reward"),
    ),
    "OpenRLHF, normalised": Adapter(
        source=_OPENRLHF,
        recognises=_is_openrlhf(normalised=True),
        stored={"score": "score.value"},
        head_key="value_head_prefix",
        head=Standardised,
        end=_at_end_of_text,
    ),
    "INF-ORM, Qwen2.5-Math-RM": Adapter(
        source=f"{_BENCH}inform.py",
        recognises=_is("INFORMForSequenceClassification", "Qwen2ForRewardModel"),
        stored={"score": "score"},
        head=two_layer_head,
    ),
    "Qwen2.5-Math-PRM": Adapter(
        source=f"{_HUB}Qwen/Qwen2.5-Math-PRM-7B",
        recognises=_is("Qwen2ForProcessRewardModel"),
        stored={"score": "score"},
        head=StepOdds,
        step_token="<extra_0>",
    ),
    "InternLM2-Reward": Adapter(
        source=f"{_HUB}internlm/internlm2-20b-reward/blob/"
        "6539b1df85e74019a3e36da43901e18205c572ea/modeling_internlm2.py",
        recognises=_is("InternLM2ForRewardModel"),
        stored={"v_head": "score"},
        backbone=internlm2.BACKBONE,
        config=internlm2.as_llama,
        end=_reward_token,
        keys=("reward_token_id",),
    ),
    "GRM": Adapter(
        source=f"{_BENCH}grm.py",
        recognises=_is_grm,
        stored={"v_head.summary": "score"},
        head=grm_head,
        reads_plain_text=True,
        architecture="GRewardModel",
    ),
    "Eurus-RM": Adapter(
        source=f"{_HUB}openbmb/Eurus-RM-7b",
        recognises=_is("EurusRewardModel"),
        stored={"regression_head": "score"},
        template=_turns(
            f"[INST] {_TEXT} [/INST]", f" {_TEXT}{{{{ '' if loop.last else eos_token }}}}"
        ),
    ),
    "UltraRM": Adapter(
        source=f"{_BENCH}openbmb.py",
        recognises=_is("LlamaRewardModel", called=r"UltraRM-13b$"),
        stored={"regression_head": "score"},
        template=_turns(
            f"Human: {_TEXT}\n", f"Assistant: {_TEXT}{{{{ '' if loop.last else '\\n' }}}}"
        ),
    ),
    "Beaver": Adapter(
        source=f"{_BENCH}beaver.py",
        recognises=_is("LlamaForScore", "LlamaModelForScore"),
        stored={"score_head": "score.value", "normalizer": "score.normalizer"},
        head=RewardOrCost,
        template=_turns(
            f"USER: {_TEXT} ASSISTANT:", f"{_TEXT}{_EOS}", "BEGINNING OF CONVERSATION: "
        ),
    ),
    "Starling-RM": Adapter(
        source=f"{_BENCH}starling.py",
        recognises=_is(called=r"Starling-RM-(7B-alpha|34B)$"),
        stored={"v_head": "score"},
        backbone=[WeightRenaming(r"^transformer\.", "model.")],
        template=_turns(f"{{{{ bos_token }}}}[INST] {_TEXT} {_EOS} [/INST]", f" {_TEXT}{_EOS}"),
    ),
    "LDL-Reward": Adapter(
        source=f"{_BENCH}ldlreward.py",
        recognises=_is("LDLRewardModel27B", called=r"(LDL|Lenovo)-Reward-[^/]*$"),
        stored={
            "regression_layer": "score.regression_layer",
            "gating_layer": "score.gating_layer",
        },
        head=WeightedRatings,
        parts=_ldl_objectives,
        config=_ldl_config,
        architecture="LDLRewardModel27B",
    ),
    "URM": Adapter(
        source="https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/models/"
        "llama_classification.py",
        recognises=_is("LlamaForSequenceClassificationWithNormal_Weights"),
        stored={"score": "score.attributes", "weights": "score.weights"},
        head=WeightedAttributes,
        parts=lambda _: HELPSTEER2,
        reads_plain_text=True,
    ),
    "ArmoRM, QRM": Adapter(
        source=f"{_BENCH}qrm.py",
        recognises=_has_gate,
        stored={
            "regression_layer": "score.regression_layer",
            "reward_transform_matrix": "score.reward_transform_matrix",
            "gating": "score.gating",
        },
        head=GatedObjectives,
        parts=objectives,
    ),
    "Nemotron-Reward": Adapter(
        source=f"{_HUB}nvidia/Llama-3.1-Nemotron-70B-Reward-HF",
        recognises=_is_nemotron,
        # The authors' head is the first row of the output layer, in the place of that token's.
        tokens=lambda _: [0],
    ),
    "a token of a language model": Adapter(
        source="https://docs.vllm.ai/en/latest/models/pooling_models/",
        recognises=_names_tokens,
        tokens=lambda fields: fields[TOKENS_KEY],
        end=_prompt_at_end,
        keys=(TOKENS_KEY, PROMPT_KEY),
    ),
}
"""The first adapter that recognises a model is used."""


def find(fields: Fields, name: str | None) -> Adapter | None:
    """The adapter for a model with this config.json and this name; None for an ordinary model."""
    for adapter in ADAPTERS.values():
        if adapter.recognises(fields, name or ""):
            return adapter
    return None


# But for the one that `ADAPTERS` has.
_PROCESS_MODEL = re.compile(r"\b(?!Qwen2ForProcess)\w+For(Process|PRM|Prm)\w*")


def refuse(fields: Fields, name: str | None) -> None:
    """Raise `ModelError` for a published model that has no score of a completion."""
    summary = "this process reward model is not known"
    match = _PROCESS_MODEL.search(" ".join(_architectures(fields)))
    if match is None:
        summary = (
            "a general preference model compares pairs: its values of one completion are no score"
        )
        match = re.search(r"\bGPM-[^/]*$", name or "")
    if match is not None:
        raise ModelError(
            summary,
            where=name,
            got=match[0],
            need="one value of a conversation",
            fix="use its authors' code, or a model that docs/reward_models.md lists",
        )


def set_template(tokenizer: PreTrainedTokenizerBase, fields: Fields, name: str) -> None:
    """Give a tokenizer without a chat template the authors', end the template as the model expects,
    and note in the tokenizer how many BOS the conversations of its model's training began with.
    Raises `ModelError` where the end needs a template."""
    adapter = find(fields, name)
    before = ""
    after = ""
    default_template = None
    if adapter is not None:
        before, after = adapter.end(fields, tokenizer)
        default_template = adapter.template
    tokenizer.chat_template = tokenizer.chat_template or default_template
    template = tokenizer.chat_template
    if after and not isinstance(template, str):
        raise ModelError(
            "this model reads its score after a text that only a chat template can write",
            where=name,
            got="several chat templates" if template else "no chat template",
            need="one template",
        )
    if isinstance(template, str) and not template.endswith(after):
        # Jinja drops the end of a template's last line, which is no longer the last one.
        tokenizer.chat_template = before + template.removesuffix("\n") + after
    if adapter is not None or "SequenceClassification" in str(fields.get("architectures")):
        num_bos = _num_bos(tokenizer, fields, adapter)
        if num_bos is not None:
            # Among the settings that are saved with the tokenizer. A number that is there already
            # is somebody's correction.
            tokenizer.init_kwargs.setdefault(NUM_BOS, num_bos)


def _num_bos(
    tokenizer: PreTrainedTokenizerBase, fields: Fields, adapter: Adapter | None
) -> int | None:
    """How many BOS the conversations of another's training began with, where the tokenizer adds one
    to any text; None where it adds none, and without a template. Most trainers (open-instruct, TRL,
    OpenRLHF) take the template's text as it is, with its BOS or without."""
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer.cls_token_id is not None:  # an encoder's frame is no BOS
        return None
    if tokenizer("a probe")["input_ids"][:1] != [bos]:
        return None
    probe = [{"role": "user", "content": "Quo vadis?"}, {"role": "assistant", "content": "Romam."}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:  # a template is a program: it can raise anything
        return None
    # GRM's keys: of those that are plain classifiers too.
    adds_bos = "vhead_layer_type" in fields
    if adapter is not None:
        adds_bos = adds_bos or adapter.reads_plain_text or adapter.template is not None
    # The trainer's, and those that the template itself has written.
    num_bos = int(adds_bos)
    for token in ids:
        if token != bos:
            break
        num_bos += 1
    return num_bos
