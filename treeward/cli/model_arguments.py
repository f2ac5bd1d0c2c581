"""The arguments of every verb that loads a reward model, and what becomes of them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from treeward.errors import ConfigError

if TYPE_CHECKING:
    from treeward.config.ensemble import EnsembleConfig
    from treeward.config.reward_shaping import RewardShapingConfig

__all__ = [
    "RewardModels",
    "add_loading_arguments",
    "add_model_arguments",
    "add_reward_arguments",
    "ensemble_section",
    "fixed_shaping",
    "loading_options",
    "model_options",
    "parse_yaml",
    "positive",
    "shaping_section",
]


@dataclass(frozen=True, slots=True)
class RewardModels:
    """Reward models that score as one: a single one, or an ensemble; with or without a shaping of their scores.

    `where`: the option that asks for the shaping, for errors.
    """

    models: tuple[str, ...]
    ensemble: EnsembleConfig | None = None
    shaping: RewardShapingConfig | Literal["contract"] | None = None
    where: str = "--shaping"

    def load(self, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """The scorer, and the `Shaper` of its scores (None without shaping). `options`: those of `Scorer.load`.

        Raises `ConfigError` for a shaping whose rewards depend on the order of what is scored.
        """
        if self.ensemble is not None:
            module = importlib.import_module("treeward.scoring.ensemble")
            scorer = module.EnsembleScorer.load(self.models, config=self.ensemble, **options)
        else:
            scorer = importlib.import_module("treeward.scoring.scorer").Scorer.load(self.models[0], **options)
        return scorer, self.shaper(tokenizer=scorer.renderer.tokenizer)

    def shaper(self, **tokenizer: Any) -> Any:
        """The shaper alone, without the weights: what is missing or cannot be is told before they are loaded.

        `tokenizer`: the arguments of that name, or `trust_remote_code`, of `load_shaper`.
        """
        rewarding = importlib.import_module("treeward.scoring.rewarding")
        is_ensemble = self.ensemble is not None
        shaper = rewarding.load_shaper(self.shaping, self.models[0], is_ensemble=is_ensemble, **tokenizer)
        if shaper is not None:
            rewarding.check_fixed(shaper.config, self.where)
        return shaper

    def check_alone(self, **tokenizer: Any) -> Any:
        """The shaper, as `shaper` gives it. Raises `ConfigError` for one that compares with reference answers too."""
        shaper = self.shaper(**tokenizer)
        if shaper is not None:
            importlib.import_module("treeward.scoring.rewarding").check_alone(shaper.config, self.where)
        return shaper

    def load_rewards(self, options: Mapping[str, Any]) -> Any:
        """A `ConversationScorer`: the scorer, or, with shaping, one whose scores are the rewards.

        Raises as `check_alone`.
        """
        scorer, shaper = self.load(options)
        if shaper is None:
            return scorer
        return importlib.import_module("treeward.scoring.rewarding").RewardScorer(scorer, shaper, where=self.where)


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """How scores of models become rewards."""
    parser.add_argument(
        "--shaping", metavar="YAML", help="a reward_shaping section, or `contract` for that of the model's contract"
    )
    parser.add_argument(
        "--ensemble", metavar="YAML", help="several models as one: mean, worst, uncertainty, or an ensemble section"
    )


def ensemble_section(given: Any, where: str = "--ensemble") -> EnsembleConfig:
    """An ensemble section: text as an option has it, or what was read of one already; a name is a method."""
    value = parse_yaml(given, where) if isinstance(given, str) else given
    section = importlib.import_module("treeward.config.ensemble").EnsembleConfig
    ensemble: EnsembleConfig = importlib.import_module("treeward.config.load").load_section(
        section, {"method": value} if isinstance(value, str) else value, where=where
    )
    return ensemble


def fixed_shaping(given: Any, where: str = "--shaping") -> RewardShapingConfig | Literal["contract"] | None:
    """A shaping that makes the same reward of a conversation wherever it stands: a section, "contract", or None.

    `given`: as `ensemble_section` takes it. Raises `ConfigError` for one with running statistics.
    """
    if given is None:
        return None
    if given == "contract":
        return "contract"
    shaping = shaping_section(given, where)
    if shaping.running:  # asked here: the import takes seconds, and most shapings have nothing to refuse
        importlib.import_module("treeward.scoring.rewarding").check_fixed(shaping, where)
    return shaping


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded."""
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ...; default: a GPU where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the backbone's weights")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded, and how it scores."""
    parser.add_argument("--batch-tokens", type=positive, default=None, metavar="N", help="tokens in one forward pass")
    parser.add_argument("--max-length", type=positive, default=None, metavar="N", help="tokens of a conversation")
    parser.add_argument(
        "--truncation",
        choices=("drop", "truncate_left", "error"),
        help="what becomes of longer ones: no score, the oldest context cut, an error; default: as in training",
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="score even if the model does not keep its scoring contract"
    )
    add_loading_arguments(parser)


def loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The device, dtype and trust_remote_code that were given. Raises `ConfigError` for a device that is not there."""
    _check_device(arguments.device)
    pretrained = importlib.import_module("treeward.model.pretrained")
    return {
        "device": arguments.device,
        "dtype": pretrained.DTYPES[arguments.dtype],
        "trust_remote_code": arguments.trust_remote_code,
    }


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `Scorer.load` that were given. Raises `ConfigError` for a device that is not there."""
    options = loading_options(arguments) | {"check_contract": not arguments.unchecked}
    given = {name: getattr(arguments, name) for name in ("batch_tokens", "max_length", "truncation")}
    return options | {name: value for name, value in given.items() if value is not None}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, need a positive number")
    return int(text)


def parse_yaml(text: str, option: str) -> Any:
    """A mapping or a name that is given as an option."""
    yaml = importlib.import_module("yaml")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the option cannot be read", where=option, got=text, need="YAML, as {key: value}, or a name"
        ) from error
    if not isinstance(value, str | dict):
        raise ConfigError("the option is no section", where=option, got=text, need="{key: value, ...}, or a name")
    return value


def shaping_section(given: Any, where: str = "--shaping") -> RewardShapingConfig:
    """A reward_shaping section: text as an option has it, or what was read of one already."""
    value = parse_yaml(given, where) if isinstance(given, str) else given
    if isinstance(value, str):
        raise ConfigError("this is no shaping", where=where, got=value, need="a section, as {reference: par}")
    section = importlib.import_module("treeward.config.reward_shaping").RewardShapingConfig
    shaping: RewardShapingConfig = importlib.import_module("treeward.config.load").load_section(
        section, value, where=where
    )
    return shaping


def _check_device(name: str | None) -> None:
    if name is None:
        return
    torch = importlib.import_module("torch")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ConfigError(
            "the device cannot be used",
            where="--device",
            got=f"{name}: {str(error).splitlines()[0]}",
            need="cpu, or a GPU that torch sees, as cuda or cuda:1",
        ) from error
