"""The configuration reference, generated from the schema: `docs/config.md` is its output.

    python -m treeward.config.reference > docs/config.md

A test holds the file to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from treeward.config.base import Strict, sections
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import ENVIRONMENT_SECTIONS
from treeward.config.run import RewardModelRunConfig

__all__ = ["config_reference"]

_OPENING = """# Configuration

Every key of a run, its type, its default and its meaning; those of `treeward serve` are in
[its guide](serving.md#several-models-ensembles-shaping). This page is generated from the schema
(`python -m treeward.config.reference > docs/config.md`), and a test holds it to the schema.

A file needs a model and data; everything else has a default:

```yaml
policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct}
data: {train_data_path: train.jsonl, val_data_path: val.jsonl}
```

**References.** `${policy.model_name}` stands for the value of another key; `${mul:a,b}`, `${div:a,b}`, `${max:a,b}`,
`${min:a,b}` and `${int:a}` compute.

**Inheritance.** `defaults: base.yaml`, or a list of files, lays this file over others, relative to its folder. Mappings
are merged; a section with `_override_: true` replaces that of the other file.

**Overrides.** On the command line, `rm.seed=7` sets a key, `+rm.seed=7` adds a key that the file must not have,
`++rm.seed=7` sets it either way, `~rm.seed` removes it. A value is YAML, as in the file: put text with `: `, `#` or a
leading `*` in quotes. A misspelt key fails with the nearest name.

**Checks.** The command checks packages, paths, names of datasets and the columns of the first row before it loads
PyTorch, so that most mistakes show at once. `train()` and `grpo()` check the packages.
"""

_ENVIRONMENTS = """# Environments

The sections under `env:`, which reward completions; in Python they are the `env_config` of an environment's class.
[Environments](environments.md) and [other rewards](rewards.md) show them at work.
"""

_GRPO = """# A run of GRPO

The keys of `treeward grpo`. A file needs a policy, prompts and an environment; everything else has a default:

```yaml
policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct, max_total_sequence_length: 1024}
data: {dataset_name: PromptDataset, train_data_path: prompts.jsonl, val_data_path: held_out.jsonl}
env: {reward_model: {model_name: results/rm/final}}
```

References, inheritance and overrides work as above. Sections that are the same in both kinds of run are listed above
only. Files of NeMo RL's GRPO load unchanged; a feature that treeward does not have is an error where it is switched on.
"""

_PROMPT_FORMS = """The two other forms of this section are those of comparisons, above:

```yaml
data:
  dataset_name: ResponseDataset
  train_data_path: train.jsonl
  val_data_path: val.jsonl
  input_key: question
  output_key: answer
  env_name: math
env: {math: {}}
```

```yaml
data:
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}   # or a list of blocks
  validation: null                                                         # the held-out rows
  default: {prompt_file: cot.txt, env_name: {math: 1.0, format: 0.2}}
env: {math: {}, format: {type: rules, rule: regex, pattern: "</think>"}}
```

In the flat form `OpenMathInstruct-2` holds out 5 % of its rows, `DeepScaler` is validated on `AIME2024`, and `Bundled`
brings a validation set.
"""

_DATA_FORMS = """Two other forms of this section mean the same. The flat one:

```yaml
data:
  dataset_name: PreferenceDataset      # or, older, dataset_type: rank | binary
  train_data_path: train.jsonl
  train_split: null
  val_data_path: val.jsonl             # the set called default
  val_data_paths: {plain: plain.jsonl, hard: hard.jsonl}
  val_split: null
```

and blocks, where `default` holds the keys that the others leave out:

```yaml
data:
  train: {data_path: train.jsonl}      # or a list of blocks
  validation: {data_path: val.jsonl}   # or a list, or {name: block}
  default: {dataset_name: BinaryPreferenceDataset, prompt_key: context}
```

`HelpSteer3`, `Tulu3Preference` and `Bundled` bring their own data: `dataset_name` alone is enough.
"""


def config_reference() -> str:
    """The whole reference as one Markdown page."""
    reward_model, grpo = list(_tables(RewardModelRunConfig, "")), list(_tables(GRPORunConfig, ""))
    lines = [_OPENING]
    for path, section in reward_model:
        lines += _section(section, path, forms=_DATA_FORMS if path == "data" else None)
    lines.append(_GRPO)
    paths = {path for path, _ in reward_model}
    for path, section in grpo:
        if (path, section) not in reward_model:
            of = " of GRPO" if path in paths else ""
            lines += _section(section, path, of=of, forms=_PROMPT_FORMS if path == "data" else None)
    lines.append(_ENVIRONMENTS)
    for kind, schema in ENVIRONMENT_SECTIONS.items():
        for path, section in _tables(schema, f"env.{kind}"):
            lines += _section(section, path)
    return "\n".join(lines).rstrip() + "\n"


def _tables(section: type[Strict], path: str) -> Iterator[tuple[str, type[Strict]]]:
    """A section and those inside it, each with its path."""
    yield path, section
    for name, field in section.model_fields.items():
        for child in sections(field.annotation):
            suffix = "[]" if get_origin(field.annotation) is tuple else ""
            if path == "data" and name == "validation":
                continue  # the same class as train
            yield from _tables(child, f"{path}.{field.alias or name}".lstrip(".") + suffix)


def _section(section: type[Strict], path: str, *, of: str = "", forms: str | None = None) -> Iterator[str]:
    if path:
        yield f"## `{path}`{of}\n"
        yield f"{' '.join((section.__doc__ or '').split())}\n"
    if forms:
        yield forms
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        key = field.alias or name
        doc = re.sub(r"\bNone\b", "`null`", " ".join((field.description or "").split()))
        yield f"| `{key}` | {_cell(_type_name(field.annotation))} | {_cell(_default(field))} | {_cell(doc)} |"
    yield ""
    if keys := section.keys_without_effect():
        yield f"Accepted, without effect: {', '.join(f'`{key}`' for key in keys)}.\n"
    if off := [f"`{key}` ({fix})" for key, fix in section.keys_that_must_be_off().items()]:
        yield f"Accepted while switched off: {'; '.join(off)}.\n"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        names = [_type_name(argument) for argument in arguments if argument is not NoneType]
        return " or ".join([*dict.fromkeys(names), *(["null"] if NoneType in arguments else [])])
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}s"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return "section"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Strict):
        return "below"
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(config_reference())
