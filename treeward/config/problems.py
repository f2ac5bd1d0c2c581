"""From pydantic's validation error to one `ConfigError` that a user can act on.

    rm.yaml:4: there is no such key
      field: policy.train_global_batch_sise
      got:   128
      fix:   did you mean policy.train_global_batch_size?

All problems are listed, each with the file and line, or the override, that its value comes from.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from treeward.config.base import Strict, nearest_name
from treeward.errors import ConfigError

__all__ = ["config_error", "sections"]

Location = tuple[str, ...]

_COMMANDS: dict[tuple[str, ...], dict[str, str]] = {
    (): {
        **dict.fromkeys(("env", "grpo", "loss_fn"), "treeward grpo"),
        **dict.fromkeys(("rm", "hub", "evaluation", "reward_shaping"), "treeward train"),
    },
    ("policy",): {"generation": "treeward grpo", "logprob_chunk_size": "treeward grpo"},
}
"""Where a key stands -> the key -> the only command that reads it there."""

_GROUP = ("grpo.num_generations_per_prompt",)
_LEARNING_RATE = ("policy.optimizer.kwargs.lr",)
_PENALTY = ("loss_fn.reference_policy_kl_penalty",)
_CLIP = ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")
_FROM_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "beta": _PENALTY,
    "clip_ratio": _CLIP,
    "clip_ratio_c": ("loss_fn.ratio_clip_c",),
    "clip_ratio_high": _CLIP[1:],
    "clip_ratio_low": _CLIP[:1],
    "delta": ("loss_fn.ratio_clip_c",),
    "epsilon": _CLIP,
    "epsilon_high": _CLIP[1:],
    "kl_coef": _PENALTY,
    "kl_loss_coef": _PENALTY,
    "kl_loss_type": ("loss_fn.reference_policy_kl_type",),
    "learning_rate": _LEARNING_RATE,
    "lr": _LEARNING_RATE,
    "max_completion_length": ("policy.generation.max_new_tokens",),
    "max_prompt_length": ("data.max_input_seq_length",),
    "max_steps": ("grpo.max_num_steps", "rm.max_num_steps"),
    "norm_adv_by_std_in_grpo": ("grpo.normalize_rewards",),
    "num_generations": _GROUP,
    "num_generations_eval": ("grpo.num_val_generations",),
    "num_iterations": ("grpo.updates_per_batch",),
    "num_train_epochs": ("grpo.max_num_epochs", "rm.max_num_epochs"),
    "ppo_epochs": ("grpo.updates_per_batch",),
    "ppo_mini_batch_size": ("policy.train_global_batch_size",),
}
"""A key of TRL or verl, as docs/coming-to-grpo.md lists them -> what it is called here; those that a run has count."""

_VALUES_FROM_ELSEWHERE: Mapping[str, str] = {"rloo": "leave_one_out", "low_var_kl": "k3", "mse": "k2", "kl": "k1"}
"""A value of TRL or verl -> the same here, for keys that have it."""


@dataclass(frozen=True, slots=True)
class _Problem:
    summary: str
    field: str
    where: str
    got: Any = None
    need: str | None = None
    fix: str | None = None

    def lines(self) -> Iterator[str]:
        yield f"  {self.where}: {self.summary}"
        for name in ("field", "got", "need", "fix"):
            value = getattr(self, name)
            if value is not None and value != "":
                yield f"    {name + ':':6} {_shown(value)}"


def config_error(
    error: ValidationError, root: type[Strict], tree: Any, *, file: str, origin: Callable[[Location], str]
) -> ConfigError:
    """Turn every problem of `error`, found in `tree` for `root`, into one `ConfigError`.

    `origin` says where the value at a key comes from, as `rm.yaml:17`.
    """
    problems = [_problem(details, root, tree, origin) for details in error.errors(include_url=False)]
    if len(problems) == 1:
        one = problems[0]
        optional = {} if one.got is None else {"got": _shown(one.got)}
        return ConfigError(
            one.summary, where=one.where, field=one.field or None, need=one.need, fix=one.fix, **optional
        )
    listed = "\n".join(line for problem in problems for line in problem.lines())
    return ConfigError(f"the configuration has {len(problems)} mistakes\n{listed}", where=file)


def sections(annotation: Any) -> Iterator[type[Strict]]:
    """Every section class that an annotation mentions, as `DatasetConfig` in `tuple[DatasetConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from sections(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType, tuple):
        for argument in get_args(annotation):
            yield from sections(argument)


def _problem(details: ErrorDetails, root: type[Strict], tree: Any, origin: Callable[[Location], str]) -> _Problem:
    # Tags of a union, in angle brackets, are no part of the key.
    location = _as_written(tuple(str(part) for part in details["loc"] if not str(part).startswith("<")), tree)
    context = details.get("ctx", {})
    inner = context.get("error")
    if isinstance(inner, ConfigError):
        location = (*location, *_split(inner.field)) if inner.field else location
        return _Problem(inner.summary, _joined(location), origin(location), inner.got, inner.need, inner.fix)
    if details["type"] == "extra_forbidden":
        return _unknown_key(location, details["input"], root, origin)
    if details["type"] == "missing":
        return _Problem(
            "a key is missing", _joined(location), origin(location), need=_first_sentence(_doc(root, location))
        )
    need = details["msg"].removeprefix("Input should be ").split(", unable to parse")[0]
    meaning = _first_sentence(_doc(root, location))
    near = _near_value(details["input"], re.findall(r"'([^']*)'", str(context.get("expected", ""))))
    return _Problem(
        "the value is not valid",
        _joined(location),
        origin(location),
        "null" if details["input"] is None else details["input"],
        f"{need} ({meaning})" if meaning else need,
        f"did you mean {near}?" if near else None,
    )


def _near_value(got: Any, options: list[str]) -> str | None:
    """The one of a key's `options` that was probably meant."""
    if not isinstance(got, str):
        return None
    same = _VALUES_FROM_ELSEWHERE.get(got.lower())
    return same if same in options else nearest_name(got, options)


def _unknown_key(location: Location, got: Any, root: type[Strict], origin: Callable[[Location], str]) -> _Problem:
    *parents, key = location
    command = _COMMANDS.get(tuple(parents), {}).get(key) if "policy" in root.model_fields else None
    if command is not None:
        return _Problem(
            f"{key} belongs to `{command}`",
            _joined(location),
            origin(location),
            need="a configuration of this command's run",
            fix=f"run `{command}`, or remove the key: ~{_joined(location)} on the command line",
        )
    candidates = [
        name for section in _sections_at(root, parents) for name in (*section.key_names(), *section.other_forms)
    ]
    # A misspelt name from elsewhere is nearer to that name than to any of ours.
    here = [name for name in _FROM_ELSEWHERE if _own_names(name, root, parents)]
    near = nearest_name(key, [*candidates, *here])
    suggestion = " and ".join(_own_names(key, root))
    if not suggestion and near in here and near not in candidates:
        suggestion = " and ".join(_own_names(near, root, parents))
    elif not suggestion:
        suggestion = _joined((*parents, near)) if near else _elsewhere(key, root) or ""
    return _Problem(
        "there is no such key",
        _joined(location),
        origin(location),
        got,
        None if suggestion else f"one of {', '.join(candidates)}",
        f"did you mean {suggestion}?" if suggestion else None,
    )


def _own_names(key: str, root: type[Strict], parents: typing.Sequence[str] | None = None) -> list[str]:
    """What a key of another toolkit is called in `root`, in the section at `parents` if that is given."""
    found = []
    for path in _FROM_ELSEWHERE.get(key, ()):
        # A section that is made in Python has the end of the path only.
        ends = [path.split(".")[start:] for start in range(path.count(".") + 1)]
        own = next((end for end in ends if _reaches(root, end)), None)
        if own is not None and (parents is None or own[:-1] == list(parents)):
            found.append(_joined(own))
    return found


def _reaches(section: type[Strict], path: typing.Sequence[str]) -> bool:
    """Whether there is such a key in a section; a key without a schema of its own may hold any."""
    field = next((field for name, field in section.model_fields.items() if path[0] in (field.alias, name)), None)
    if field is None:
        return False
    inner = list(sections(field.annotation))
    return len(path) == 1 or not inner or any(_reaches(one, path[1:]) for one in inner)


def _elsewhere(key: str, root: type[Strict], prefix: Location = ()) -> str | None:
    """The full name of a key that is spelt exactly so in another section."""
    for name, field in root.model_fields.items():
        path = (*prefix, field.alias or name)
        if path[-1] == key:
            return _joined(path)
        if get_origin(field.annotation) is tuple:
            continue
        for section in sections(field.annotation):
            if (found := _elsewhere(key, section, path)) is not None:
                return found
    return None


def _sections_at(root: type[Strict], location: typing.Sequence[str]) -> list[type[Strict]]:
    current = [root]
    for part in location:
        if part.isdecimal():
            continue
        current = [
            section
            for parent in current
            for name, field in parent.model_fields.items()
            if part in (field.alias, name)
            for section in sections(field.annotation)
        ]
    return current


def _doc(root: type[Strict], location: Location) -> str:
    *parents, key = [part for part in location if not part.isdecimal()] or [""]
    for section in _sections_at(root, parents):
        for name, field in section.model_fields.items():
            if key in (field.alias, name):
                return field.description or ""
    return ""


def _first_sentence(text: str) -> str:
    return re.split(r"(?<!\bet al)\. ", " ".join(text.split()))[0].rstrip(".")


def _as_written(location: Location, tree: Any) -> Location:
    """Without the number of a list's element where the file has a single block instead of a list."""
    written: list[str] = []
    for part in location:
        if isinstance(tree, dict) and part.isdecimal() and part not in tree:
            continue
        written.append(part)
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdecimal() and int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tuple(written)


def _split(field: str) -> Location:
    return tuple(field.replace("[", ".").replace("]", "").split("."))


def _joined(location: typing.Iterable[str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if part.isdecimal() else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
