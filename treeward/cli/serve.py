"""`treeward serve`: reward models behind an HTTP address, in every dialect that RL frameworks speak."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeward.cli.model_arguments import add_reward_arguments, parse_yaml
from treeward.config.load import load_file
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError

__all__ = ["EXAMPLES", "add_arguments", "check_ensembles", "ensemble_members", "run"]

EXAMPLES = """\
examples:
  treeward serve results/quickstart/final
  treeward serve MODEL OTHER_MODEL --host 0.0.0.0 --port 8000 token_env=TREEWARD_TOKEN
  treeward serve MODEL OTHER_MODEL --ensemble worst --shaping "{length_penalty: {coefficient: 0.001}}"
  treeward serve --config server.yaml --port 8001 deadline_seconds=30
  treeward serve MODEL allowed_hosts=rm.example.org

Then, from another terminal:
  curl localhost:8000/v1/rewards -H 'content-type: application/json' \\
      -d '{"context": [{"role": "user", "content": "2 + 2?"}], "completions": ["4", "5"]}'"""


_OF_MODELS = ("shaping", "ensemble", "device", "dtype", "trust_remote_code", "unchecked")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folders or hub names of reward models; and key=value for any key of the server's configuration",
    )
    parser.add_argument("--config", default=None, metavar="FILE", help="a YAML file with the server's configuration")
    parser.add_argument("--host", default=None, help="the address to listen on; default 127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=None, help="the port to listen on; default 8000, 0 takes a free one"
    )
    add_reward_arguments(parser)
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ...; default: a GPU where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help="of the backbone's weights")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")
    parser.add_argument(
        "--unchecked", action="store_true", help="serve even a model that does not keep its scoring contract"
    )


def run(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    # Threads that spin between two batches take the processor from those that read requests. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for package in ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                "the server needs packages that are not installed",
                got=f"no module {package}",
                fix="pip install 'treeward[serve]'",
            ) from error
    check_ensembles(config)
    logging = importlib.import_module("treeward.serving.logs")
    logging.configure(config.log_format, debug=arguments.debug)
    return int(importlib.import_module("treeward.serving.run").serve(config))


def _config(arguments: argparse.Namespace) -> ServerConfig:
    overrides = [word for word in arguments.models if "=" in word]
    models = [word for word in arguments.models if "=" not in word]
    values: dict[str, Any] = {"models": _sections(models, arguments)} if models else {}
    values |= {key: value for key in ("host", "port") if (value := getattr(arguments, key)) is not None}
    if not models and arguments.config is None:
        raise ConfigError("there is nothing to serve", where="MODEL", need="a reward model, or --config FILE")
    given = [f"--{name.replace('_', '-')}" for name in _OF_MODELS if getattr(arguments, name)]
    if not models and given:
        raise ConfigError(
            "the options are for models that are named on the command line",
            where=", ".join(given),
            need="MODEL, or the same in the file's models",
        )
    return load_file(ServerConfig, arguments.config, overrides, values=values)


def _sections(models: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    common: dict[str, Any] = {}
    if arguments.shaping is not None:
        common["shaping"] = parse_yaml(arguments.shaping, "--shaping")
    for key in ("device", "dtype"):
        if getattr(arguments, key) is not None:
            common[key] = getattr(arguments, key)
    if arguments.trust_remote_code:
        common["trust_remote_code"] = True
    if arguments.unchecked:
        common["check_contract"] = False
    if arguments.ensemble is None:
        return [{"model": model, **common} for model in models]
    ensemble = parse_yaml(arguments.ensemble, "--ensemble")
    section = {"method": ensemble} if isinstance(ensemble, str) else ensemble
    return [{**ensemble_members(models, section, "--ensemble"), "ensemble": section, **common}]


def ensemble_members(models: Sequence[str], section: Mapping[str, Any], option: str) -> dict[str, Any]:
    """The model, or models, of an ensemble on the command line. Raises `ConfigError` for too many or too few."""
    if section.get("over") == "heads":
        if len(models) > 1:
            raise ConfigError(
                "an ensemble of heads is of one model",
                where=option,
                got=", ".join(models),
                need="one model, or no over: heads",
            )
        return {"model": models[0]}
    if len(models) == 1:
        raise ConfigError(
            "one model is no ensemble",
            where=option,
            got=models[0],
            need="two models or more, or the heads of one: --ensemble '{method: mean, over: heads}'",
        )
    return {"models": list(models)}


def check_ensembles(config: ServerConfig) -> None:
    """Raises `ConfigError` where an ensemble is to be standardized and a member's contract has no constants for it:
    before any of the server's models is loaded, for that may take minutes. Only members that are folders are looked at.
    """
    for i, section in enumerate(config.models):
        ensemble = section.ensemble
        if ensemble is None or not ensemble.standardize or ensemble.over == "heads" or ensemble.means is not None:
            continue
        read_contract = importlib.import_module("treeward.model.contract").read_contract
        folders = [name for name in section.members if Path(name).expanduser().is_dir()]
        calibrations = {name: getattr(read_contract(name), "calibration", None) for name in folders}
        missing = [name for name, one in calibrations.items() if one is None or one.normalization is None]
        if missing:
            raise ConfigError(
                "the members cannot be standardized: the mean and standard deviation of their scores are not known",
                where=section.served_name,
                field=f"models[{i}].ensemble",
                got=f"no such constants in the contract of {', '.join(missing)}",
                need="a calibration of each member on the same data, or scores that are on one scale already",
                fix=f"treeward calibrate {missing[0]} --data FILE, and so each; "
                f"or ensemble: {{method: {ensemble.method}, standardize: false}}",
            )
