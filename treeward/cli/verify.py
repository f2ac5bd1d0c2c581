"""`treeward verify`: replay a model's scoring contract, on this machine or on a server, and name what differs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeward.cli.model_arguments import add_loading_arguments, loading_options, parse_yaml
from treeward.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from treeward.model.contract import HeadContract, ScoringContract

__all__ = ["EXAMPLES", "add_arguments", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward verify results/quickstart/final
  treeward verify results/quickstart/final --device cuda --dtype bfloat16
  treeward verify results/quickstart/final --quick
  treeward verify downloaded/model --write
  treeward verify downloaded/model --write --head-weights helpfulness=1,verbosity=-0.2
  treeward verify results/quickstart/final --against http://localhost:8000
  treeward verify results/quickstart/final --against http://gpu7:8001 --dialect vllm --dtype bfloat16

--write makes the contract of a folder that treeward has not made. Compared are, in this order: the contract, the files,
the chat template, the tokens, the read position, the number format, what is applied to the score, the weights. What
differs first is the cause. The exit code is 0 where everything is equal, 1 where something differs, 2 where there is
nothing to compare.

--against asks a server for the scores of the golden conversations; of MODEL only the contract and the tokenizer are
read. --dialect says how it is asked: as treeward's own, vLLM's, SGLang's, OpenRLHF's or text-embeddings-inference's
clients do. --dtype is then what the server computes in."""

_SERVER_OPTIONS = ("dialect", "served_model", "send", "body", "token_env", "timeout", "tls_ca")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a reward model")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    parser.add_argument(
        "--write", action="store_true", help="write the contract of a folder that has none, as it is now"
    )
    parser.add_argument("--force", action="store_true", help="with --write: replace the contract that is there")
    parser.add_argument(
        "--head-weights",
        metavar="WEIGHTS",
        help="with --write: how the labels of a model with several make one score, as name=1,other=0.5 or 1,0.5",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="hash the head's weights only; hashing all of them takes about a second per GB",
    )
    add_loading_arguments(parser)
    server = parser.add_argument_group("on a server")
    server.add_argument("--against", metavar="URL", help="replay on this server, as http://localhost:8000")
    server.add_argument(
        "--dialect", choices=("treeward", "vllm", "sglang", "openrlhf", "tei"), help="how it is asked; default treeward"
    )
    server.add_argument(
        "--model", dest="served_model", metavar="NAME", help="what it calls the model; default: its first"
    )
    server.add_argument(
        "--send",
        choices=("text", "bare", "tokens", "messages"),
        help="rendered text, that without its BOS (or CLS and SEP), token ids, or messages; default: as clients do",
    )
    server.add_argument("--body", metavar="YAML", help="keys to add to each request, as {add_special_tokens: false}")
    server.add_argument("--token-env", metavar="NAME", help="the environment variable that holds the bearer token")
    server.add_argument(
        "--tls-ca", metavar="FILE", help="a PEM file with the certificates to trust; default: the system's"
    )
    server.add_argument("--timeout", type=float, metavar="SECONDS", help="how long a request may take; default 60")


def run(arguments: argparse.Namespace) -> int:
    if arguments.against is not None:
        return _run_against(arguments)
    for name in _SERVER_OPTIONS:
        if getattr(arguments, name) is not None:
            option = "--model" if name == "served_model" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no meaning alone", where=option, need=f"--against URL {option}")
    torch = importlib.import_module("torch")
    verification = importlib.import_module("treeward.scoring.verification")
    options = loading_options(arguments)
    for option, value in (("--force", arguments.force), ("--head-weights", arguments.head_weights)):
        if value and not arguments.write:
            raise ConfigError(f"{option} has no meaning alone", where=option, need=f"--write {option}")
    if arguments.write:
        _write(arguments, "cuda" if arguments.device is None and torch.cuda.is_available() else arguments.device)
    result = verification.verify(arguments.model, quick=arguments.quick, **options)
    _show(result, _text(result), as_json=arguments.json)
    if not result.could_compare:
        return 2
    return 0 if result.first_difference is None else 1


def _run_against(arguments: argparse.Namespace) -> int:
    for option, value in (
        ("--write", arguments.write), ("--force", arguments.force), ("--quick", arguments.quick),
        ("--head-weights", arguments.head_weights), ("--device", arguments.device),
    ):  # fmt: skip
        if value:
            raise ConfigError(
                f"{option} and --against do not go together", where=option, need="one of them: the server has the model"
            )
    token = None
    if arguments.token_env is not None:
        token = os.environ.get(arguments.token_env, "").strip()
        if not token:
            raise ConfigError(
                "the bearer token is not there",
                where="--token-env",
                got=f"the environment variable {arguments.token_env} is empty or not set",
                need="the token in it",
            )
    seconds = 60.0 if arguments.timeout is None else arguments.timeout
    if not 0 < seconds < float("inf"):
        raise ConfigError("the time limit is not positive", where="--timeout", got=seconds, need="seconds")
    extra = None if arguments.body is None else parse_yaml(arguments.body, "--body")
    if isinstance(extra, str):
        raise ConfigError("these are no keys", where="--body", got=extra, need="{key: value, ...}")
    result = importlib.import_module("treeward.client.verification").verify_server(
        arguments.model,
        arguments.against,
        dialect=arguments.dialect or "treeward",
        model=arguments.served_model,
        form=arguments.send,
        dtype=arguments.dtype,
        token=token,
        extra=extra,
        timeout_seconds=seconds,
        verify_tls=True if arguments.tls_ca is None else arguments.tls_ca,
        trust_remote_code=arguments.trust_remote_code,
    )
    _show(result, _server_text(result), as_json=arguments.json)
    return 0 if result.equal else 1


def _show(result: Any, text: str, *, as_json: bool) -> None:
    if as_json:
        first = result.first_difference
        content = dataclasses.asdict(result) | {"equal": result.equal, "first_difference": first and first.part}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text)


def _table(result: Any) -> list[str]:
    results = importlib.import_module("treeward.tables")
    rows = [{"part": check.part, "state": check.state, "finding": check.summary} for check in result.checks]
    can_draw = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return [results.results_table(rows, ["part", "state", "finding"], ascii_only=not can_draw), ""]


def _difference(name: str, first: Any) -> list[str]:
    details = (("got", first.got), ("need", first.need), ("fix", first.fix))
    return [
        f"{name}: what differs first is the {first.part}: {first.summary}",
        *(f"  {label + ':':6} {value}" for label, value in details if value is not None),
    ]


def _server_text(result: Any) -> str:
    model = "" if result.served_model is None else f", model {result.served_model}"
    server = f"{result.against} (as {result.dialect}, {result.form} sent{model})"
    if result.first_difference is not None:
        return "\n".join([*_table(result), *_difference(server, result.first_difference)]) + "\n"
    return "\n".join(
        [
            *_table(result),
            f"{server}: equal: {result.num_scores} golden scores of {result.model}, to within "
            f"{result.largest_difference:.1e}; up to {result.tolerance:.1e} is rounding.\n",
        ]
    )


def _text(result: Any) -> str:
    lines = _table(result)
    first = result.first_difference
    if first is None and result.largest_difference is None:
        lines.append(f"{result.model}: nothing differs, but there are no golden scores to replay.")
    elif first is None:
        parts = ", ".join(check.part for check in result.checks if check.state == "equal" and check.part != "weights")
        weights = f"the bytes of {result.num_tensors} tensors" if result.num_tensors else "the bytes of the head"
        lines.append(
            f"{result.model}: equal: {parts}, {weights}, and {result.num_scores} golden scores, to within "
            f"{result.largest_difference:.1e}; up to {result.tolerance:.1e} is rounding."
        )
        if not result.num_tensors:
            lines.append("The other tensors were not hashed, now or when the contract was written: of them only what "
                         "moves a golden score is seen.")  # fmt: skip
    else:
        lines += _difference(result.model, first)
    return "\n".join(lines) + "\n"


def _write(arguments: argparse.Namespace, device: str | None) -> None:
    contracts = importlib.import_module("treeward.model.contract")
    golden = importlib.import_module("treeward.scoring.golden")
    pretrained = importlib.import_module("treeward.model.pretrained")
    folder = Path(arguments.model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            "a contract is written into a folder",
            where="--write",
            got=arguments.model,
            need="a model folder on this machine",
            fix=f"hf download {arguments.model} --local-dir FOLDER, then treeward verify FOLDER --write",
        )
    path = folder / contracts.CONTRACT_FILE
    if path.exists() and not arguments.force:
        raise ConfigError(
            "there is a contract already",
            where=str(path),
            need="a folder without one",
            fix="verify it (without --write); --force replaces it, and with it any record of what the scores were",
        )
    pretrained.quiet_transformers()
    try:
        before = contracts.read_contract(folder)
    except ModelError as error:
        logger.warning("The contract that is replaced cannot be read, so nothing of it is kept: %s", error.summary)
        before = None
    contract = golden.sign_folder(
        folder,
        like=before,
        heads=_heads(arguments, folder, before),
        device=device or "cpu",
        trust_remote_code=arguments.trust_remote_code,
    )
    logger.info("Wrote %s, of %d golden conversations.", path, len(contract.golden))
    if before is not None and before.calibration is not None:
        logger.warning("Its calibration is left out: treeward calibrate %s --data FILE fits a new one.", folder)


def _heads(arguments: argparse.Namespace, folder: Path, before: ScoringContract | None) -> list[HeadContract] | None:
    """What makes the score: as given, as in the contract before, or the one label. Raises `ConfigError` for several."""
    golden = importlib.import_module("treeward.scoring.golden")
    labels = golden.head_labels(folder, trust_remote_code=arguments.trust_remote_code)
    if arguments.head_weights is not None:
        heads: list[HeadContract] = golden.weighted_heads(labels, _weights(arguments.head_weights))
        return heads
    if before is not None and len(before.heads) == len(labels):
        return before.heads
    if len(labels) == 1:
        return golden.weighted_heads(labels, [1.0])  # type: ignore[no-any-return]
    raise ConfigError(
        "the model has several labels, and nothing says how they make one score",
        where=str(folder),
        got=", ".join(labels),
        need="a weight for each of them",
        fix=f"--head-weights {labels[0]}=1 takes the first alone; those not named weigh nothing",
    )


def _weights(text: str) -> dict[str, float] | list[float]:
    pairs = [part.strip().rpartition("=") for part in text.split(",")]
    try:
        if all(equals for _, equals, _ in pairs) and len({name for name, _, _ in pairs}) == len(pairs):
            return {name.strip(): float(value) for name, _, value in pairs}
        if not any(equals for _, equals, _ in pairs):
            return [float(value) for _, _, value in pairs]
    except ValueError:
        pass
    raise ConfigError(
        "the weights of the heads cannot be read",
        where="--head-weights",
        got=text,
        need="name=1,other=0.5 (each name once), or a number for each label, as 1,0.5",
    )
