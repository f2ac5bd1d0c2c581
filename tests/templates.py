"""The chat templates of real families (trl carries them), each over a tokenizer trained on the
spot.

The tokenizers have the special tokens that the template writes, and add BOS by themselves where the
family's does.
"""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from treeward.data.rendering import Renderer

SENTENCES = [
    "What is the capital of France? Paris is the capital of France.",
    "I would like to bake bread at home; how much flour do I need for two loaves?",
    "Mix 500 grams of flour, water, salt and yeast, then let the dough rest.",
    "Ünïcode, 数字 and emoji 🙂 survive too.",
]
TEMPLATES = (
    sorted(p.name.removesuffix(".jinja") for p in (importlib.resources.files("trl") / "chat_templates").iterdir()
           if p.name.endswith(".jinja"))
    if importlib.util.find_spec("trl") else []
)  # fmt: skip
# One of each structure: a preamble, BOS and turns, channels, headers, role tags, ChatML that drops
# earlier thoughts.
STRUCTURES = ("cohere", "gemma3", "gptoss", "llama3", "phi3", "qwen3")
CASES = [
    pytest.param(name, marks=[] if name in STRUCTURES else pytest.mark.slow) for name in TEMPLATES
]
# What each family's tokenizer calls its BOS and EOS, and whether it adds BOS by itself.
FAMILIES: dict[str, tuple[str | None, str, bool]] = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", True),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True),
    "diffusion_gemma": ("<bos>", "<turn|>", True),
    "gemma4": ("<bos>", "<turn|>", True),
    "gemma": ("<bos>", "<eos>", True),
    "glm4moe": (None, "<|endoftext|>", False),
    "gptoss": ("<|startoftext|>", "<|return|>", False),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>", True),
    "lfm2": ("<|startoftext|>", "<|im_end|>", True),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", True),
    "llava_next": ("<s>", "</s>", True),
    "muse_glimmer": ("<|begin_of_text|>", "<|eot|>", True),
    "nemotron": ("<s>", "<|im_end|>", False),
    "phi3": ("<s>", "<|endoftext|>", False),
    "qwen": (None, "<|im_end|>", False),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>", False),
}
SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s'\"]+[|｜]>|<(?:start|end)_of_turn>|<end_of_utterance>|<\|turn>|<turn\|>|<BOS_TOKEN>|</?s>"
)

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
PROMPTING_CHATML = (
    CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def byte_bpe(
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
    adds_bos: bool = False,
) -> PreTrainedTokenizerFast:
    own = [token for token in (bos, eos) if token is not None and token not in special]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=[*special, *dict.fromkeys(own)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


def template_source(name: str) -> str:
    return (importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(
        encoding="utf-8"
    )


def family_renderer(name: str) -> Renderer:
    source = template_source(name)
    bos, eos, adds_bos = next(
        value for prefix, value in FAMILIES.items() if name.startswith(prefix)
    )
    special = dict.fromkeys(
        token for token in SPECIAL.findall(source) if not token.startswith("<|' ")
    )
    return Renderer(byte_bpe(tuple(special), bos, eos, adds_bos), chat_template=source)
