"""Options that several verbs have, and the reward models that they name.

@with_model_options  # adds --device, --dtype, --max-length, ...
def run(model: Model, *, options: ModelOptions) -> int:
    section = checked_model(model_section(model), "MODEL", options)
    scorer, shaper, identity = load(section, options.batch_tokens)
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treeward.config.load import load_section, recipe_names
from treeward.config.policy import ScoringDtype
from treeward.config.scoring import HeadWeights, StepScore, Truncation
from treeward.config.server import ServedModelConfig
from treeward.errors import ConfigError
from treeward.storage import is_stream

if TYPE_CHECKING:
    from treeward.evaluation.session import Candidate
    from treeward.scoring.score import ConversationScorer, GroupScorer
    from treeward.scoring.scorer import PreparedScorer
    from treeward.scoring.shaping import Shaper

logger = logging.getLogger(__name__)

_RECIPES = ", ".join(recipe_names())
_CONFIG = typer.Option(
    "--config",
    metavar="FILE|RECIPE",
    help=f"A YAML file, or a recipe: {_RECIPES}.",
)
ConfigFile = Annotated[str, _CONFIG]
OptionalConfigFile = Annotated[str | None, _CONFIG]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Overrides: section.key=value sets a key, ~section.key removes one.",
    ),
]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A reward model: its folder or hub name."),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1 or auto (a GPU if there is one); default: auto."),
]
Dtype = Annotated[
    ScoringDtype,
    typer.Option(help="The dtype of the weights. Scores move by about 0.02 in bfloat16."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code of the model's authors."),
]
HeadWeightsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=1,...",
        help="The weight of each head: by name, in order as 1,0.5, or mean; of a process reward "
        "model how steps make a score: product, min or last.",
    ),
]


def output_folder(text: str | None, option: str = "--output") -> Path | None:
    """The folder of an option, which need not exist.

    Raises `ConfigError` where it, or what it lies in, is no folder that can be written: before the
    work, not after it.
    """
    if text is None:
        return None
    folder = Path(text).expanduser()
    existing = folder
    # The root is its own parent.
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    problem = None
    if not existing.is_dir():
        problem = "is not a folder"
    elif not os.access(existing, os.W_OK):
        problem = "cannot be written"
    if problem is not None:
        raise ConfigError(
            "the command cannot write its results there",
            where=option,
            got=f"{text}: {existing} {problem}",
            need="a folder that can be written, or made",
        )
    return folder


def output_file(text: str, option: str = "--output") -> Path:
    """The file of an option, which need not exist: the one that a symlink names, or a device or
    FIFO as it is.

    Raises `ConfigError` for a folder, and where no file can be written: before the work, not after
    it.
    """
    path = Path(text).expanduser()
    # /dev/stdout of a pipe resolves to a name that is no path.
    if is_stream(path):
        return path
    path = path.resolve()
    if path.is_dir():
        raise ConfigError("the output is a folder", where=option, got=text, need="a file's name")
    output_folder(str(path.parent), option)
    return path


@dataclass(frozen=True)
class ModelOptions:
    """How reward models are loaded and score; the options of `with_model_options`."""

    # None: what the model's section, its contract or the default says.
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens in a forward pass; default: 4096."),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Longest conversation, in tokens; default: by the contract."),
    ] = None
    truncation: Annotated[
        Truncation | None,
        typer.Option(
            help="What to do with conversations over --max-length; default: as in training."
        ),
    ] = None
    head_weights: HeadWeightsOption = None
    unchecked: Annotated[
        bool,
        typer.Option("--unchecked", help="Load a model even if it fails its scoring contract."),
    ] = False
    device: Device = None
    dtype: Dtype = "float32"
    trust_remote_code: TrustRemoteCode = False

    @property
    def keys(self) -> dict[str, Any]:
        """The options as keys of a model's section."""
        keys: dict[str, Any] = {
            "max_length": self.max_length,
            "truncation": self.truncation,
            "device": self.device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
            "check_contract": not self.unchecked,
        }
        if self.head_weights is not None:
            keys["head_weights"] = parse_head_weights(self.head_weights)
        return {name: value for name, value in keys.items() if value is not None}


def with_model_options(run: Callable[..., int]) -> Callable[..., int]:
    """A verb with the options of `ModelOptions`, which `run` receives as `options`.

    typer takes the options of a command from its signature. The command has the signature of `run`,
    with the fields of `ModelOptions` in the place of `options`.
    """
    own_parameters = inspect.signature(run, eval_str=True).parameters
    model_parameters = inspect.signature(ModelOptions, eval_str=True).parameters

    @functools.wraps(run)
    def command(**values: Any) -> int:
        fields = {name: values.pop(name) for name in model_parameters}
        return run(**values, options=ModelOptions(**fields))

    parameters = {**own_parameters, **model_parameters}
    del parameters["options"]
    keywords = []
    annotations = {}
    for name, parameter in parameters.items():
        # By keyword, so that one with a default may stand before one without.
        keywords.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        annotations[name] = parameter.annotation
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    # typer reads the annotations beside the signature.
    command.__annotations__ = annotations
    return command


def model_section(text: str, where: str = "MODEL") -> dict[str, Any]:
    """The section of a model that is named on the command line, by its folder or hub name, or as a
    section in YAML: `{models: [A, B], ensemble: worst}`. Raises `ConfigError` for text in braces
    that is no section.
    """
    # No folder and no name of the hub begins with a brace.
    if not text.lstrip().startswith("{"):
        return {"models": [text]}
    return section_of(text, where, example="{models: [A, B], ensemble: worst}")


def section_of(
    text: str, where: str, example: str = "{data_path: FILE, split: train}"
) -> dict[str, Any]:
    """A section in YAML, in braces. Raises `ConfigError` for other text, with an `example`."""
    import yaml

    try:
        section = yaml.safe_load(text)
    except yaml.YAMLError:
        section = None
    if not isinstance(section, dict):
        raise ConfigError(
            "the text in braces is not a section",
            where=where,
            got=text,
            need=f"YAML, as {example}",
        )
    return section


def checked_model(section: dict[str, Any], where: str, options: ModelOptions) -> ServedModelConfig:
    """A model by its section, with the options of the command as further keys.

    Raises `ConfigError` for a faulty section, and for a folder, a device or a shaping that cannot
    be.
    """
    # What the section says itself goes before the options, which are for all models.
    model = load_section(ServedModelConfig, options.keys | section, where=where)
    # These import torch, which takes seconds: a faulty section is told before.
    from treeward.model.pretrained import check_device, check_local
    from treeward.scoring.shaping import load_shaper

    check_device(model.device, where=where, field="device")
    # The last model too, before hours of the first.
    for name in model.models:
        check_local(name)
    # Constants that are missing are an error now, not after scoring.
    load_shaper(model)
    return model


def load(
    section: ServedModelConfig,
    batch_tokens: int | None,
    *,
    with_spread: bool = True,
) -> tuple[PreparedScorer, Shaper | None, Mapping[str, Any]]:
    """The scorer of a section, the `Shaper` of its scores, None without shaping, and what its rows
    depend on.

    `with_spread`: as of `Scorer.load`. A function of the module: workers import it.
    """
    from treeward.scoring.ensemble import load_scorer
    from treeward.scoring.identity import scorer_identity
    from treeward.scoring.shaping import RewardScorer, load_shaper

    logger.info("Loading %s.", ", ".join(section.models))
    # Else the scorer's own default holds.
    capacity = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
    scorer = load_scorer(section, device=section.device, with_spread=with_spread, **capacity)
    shaper = load_shaper(section)
    rewards = scorer if shaper is None else RewardScorer(scorer, shaper)
    return scorer, shaper, scorer_identity(rewards, section.models[0])


def candidate(section: dict[str, Any], where: str, options: ModelOptions) -> Candidate:
    """What takes part in an evaluation, by its section: an environment, which has a `type`, or a
    reward model.

    The note has what is not by default. Raises `ConfigError` for a faulty section.
    """
    from treeward.config.reward_environments import check_environments
    from treeward.evaluation.session import Candidate

    if "type" in section:
        # The name is the candidate's: environments have no such key.
        name = section.pop("name", None)
        check_environments({where: section})
        if name is None:
            # As judge-pairwise-qwen, which becomes the name of a folder.
            model_name = Path(str(section.get("model", ""))).name
            parts = [section["type"], section.get("mode"), model_name]
            name = "-".join(re.sub(r"[^\w.]+", "-", str(part)) for part in parts if part)
        load_environment = partial(_environment, section, where)
        return Candidate(name, load_environment, note=f"rewards of {section}")
    model = checked_model(section, where, options)
    # The report says what a reader could not guess.
    keys = model.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    note = None
    if keys.keys() != {"models"}:
        note = f"scores of {keys}"
    # The name becomes that of a folder.
    name = model.served_name.replace("/", "-")
    return Candidate(name, partial(_rewards, model, options.batch_tokens), note)


def _environment(section: dict[str, Any], where: str) -> tuple[GroupScorer, Mapping[str, Any]]:
    from treeward.environments.registry import make_environment
    from treeward.environments.scorer import EnvironmentScorer
    from treeward.rl.setup import reward_identity

    # Both take a name for sections without a `type`, which this one has.
    name = section["type"]
    environment = make_environment(name, section, where=where)
    # Rewards that were kept are used again where this is the same.
    identity: dict[str, Any] = {"section": section, "rewards": reward_identity(name, section)}
    if environment.user_code:
        identity["code"] = environment.user_code
    return EnvironmentScorer(environment), identity


def _rewards(
    section: ServedModelConfig,
    batch_tokens: int | None,
) -> tuple[ConversationScorer, Mapping[str, Any]]:
    from treeward.scoring.shaping import RewardScorer

    scorer, shaper, identity = load(section, batch_tokens)
    if shaper is None:
        return scorer, identity
    return RewardScorer(scorer, shaper), identity


def parse_head_weights(text: str) -> HeadWeights:
    """The weights of heads by the names of their labels, `a=1,b=0.5`, or of all in order,
    `1,0.5`; or a method by its name, as `mean`, `min`.
    """
    method: Literal["mean"] | StepScore
    for method in ("mean", "product", "min", "last"):
        if text == method:
            return method
    names = []
    values = []
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        names.append(name.strip())
        try:
            values.append(float(value))
        except ValueError:
            values.append(math.nan)
    are_named = any(names)
    # Beside heads that have a name one without is a mistake, and no head of the name "".
    have_names = "" not in names and len(set(names)) == len(names)
    if not all(map(math.isfinite, values)) or (are_named and not have_names):
        raise ConfigError(
            "the weights of the heads cannot be read",
            where="--head-weights",
            got=text,
            need="a=1,b=0.5, each name once; a number for each head, as 1,0.5; or mean, product, "
            "min or last",
        )
    if are_named:
        return dict(zip(names, values, strict=True))
    return tuple(values)
