"""`treeward serve`: reward models behind an HTTP address, in every dialect that RL frameworks speak."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from treeward.cli.options import Device, Ensemble, Shaping, TrustRemoteCode, Unchecked, parse_yaml
from treeward.config.load import load_file
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError

__all__ = ["EXAMPLES", "check_ensembles", "ensemble_members", "run"]

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


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|key=value", help="Reward models, and keys of the server's configuration."),
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file with the configuration.")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="The port; default 8000, 0 takes a free one.")] = None,
    shaping: Shaping = None,
    ensemble: Ensemble = None,
    device: Device = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Number format of the backbone's weights.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    unchecked: Unchecked = False,
) -> int:
    overrides = [word for word in words or [] if "=" in word]
    models = [word for word in words or [] if "=" not in word]
    common: dict[str, Any] = {
        "shaping": None if shaping is None else parse_yaml(shaping, "--shaping"),
        "device": device,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code or None,
        "check_contract": False if unchecked else None,
    }
    common = {key: value for key, value in common.items() if value is not None}
    if not models and config is None:
        raise ConfigError("there is nothing to serve", where="MODEL", need="a reward model, or --config FILE")
    if not models and (common or ensemble):
        raise ConfigError(
            "the options are for models that are named on the command line",
            where=", ".join([*common, *(["ensemble"] if ensemble else [])]),
            need="MODEL, or the same in the file's models",
        )
    values: dict[str, Any] = {key: value for key, value in {"host": host, "port": port}.items() if value is not None}
    if ensemble is not None and models:
        given = parse_yaml(ensemble, "--ensemble")
        section = {"method": given} if isinstance(given, str) else given
        values["models"] = [{**ensemble_members(models, section, "--ensemble"), "ensemble": section, **common}]
    elif models:
        values["models"] = [{"model": model, **common} for model in models]
    server = load_file(ServerConfig, config, overrides, values=values)
    # Threads that spin between two batches take the processor from those that read requests. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "the server needs packages that are not installed",
            got=f"no module {missing[0]}",
            fix="pip install 'treeward[serve]'",
        )
    check_ensembles(server)

    from treeward.serving.logs import configure
    from treeward.serving.run import serve

    configure(server.log_format, debug=logging.getLogger("treeward").isEnabledFor(logging.DEBUG))
    return serve(server)


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
        from treeward.model.contract import read_contract

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
