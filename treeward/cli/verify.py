"""`treeward verify`: replay a model's scoring contract, on this machine or on a server, and name what differs."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treeward.cli.options import Device, Dtype, Model, TrustRemoteCode, check_device, parse_yaml, write_table
from treeward.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from treeward.client.verification import ServerVerification
    from treeward.model.contract import HeadContract, ScoringContract
    from treeward.scoring.verification import Verification

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

--write makes the contract of a folder that treeward has not made. Compared are, in
this order: the contract, the files, the chat template, the tokens, the read position,
the number format, the activation, the weights. The first difference is the cause. The
exit code is 0 where everything is equal, 1 where something differs, 2 where there is
nothing to compare.

--against asks a server for the scores of the golden conversations; of MODEL only the
contract and the tokenizer are read. --dialect says how it is asked: as treeward's own,
vLLM's, SGLang's, OpenRLHF's or text-embeddings-inference's clients do. --dtype is then
the number format of the server."""

Dialect = Literal["treeward", "vllm", "sglang", "openrlhf", "tei"]
Form = Literal["text", "bare", "tokens", "messages"]


def run(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the contract of a folder that has none.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --write: replace the contract.")] = False,
    head_weights: Annotated[
        str | None,
        typer.Option(metavar="WEIGHTS", help="With --write: how several labels make a score, as a=1,b=0.5 or 1,0.5."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Hash the head's weights only; all of them take a second per GB.")
    ] = False,
    device: Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Replay on this server, as http://localhost:8000.")
    ] = None,
    dialect: Annotated[Dialect | None, typer.Option(help="How it is asked; default: treeward.")] = None,
    served_model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The server's name of the model; default: its first.")
    ] = None,
    send: Annotated[
        Form | None,
        typer.Option(help="Rendered text, text without its BOS (or CLS and SEP), token ids, or messages."),
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="YAML", help="Keys for each request, as {add_special_tokens: false}.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable with the bearer token.")
    ] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="A PEM file with the certificates to trust.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="Limit of a request; default 60.")
    ] = None,
) -> int:
    of_server = {
        "--dialect": dialect, "--model": served_model, "--send": send, "--body": body, "--token-env": token_env,
        "--tls-ca": tls_ca, "--timeout": timeout,
    }  # fmt: skip
    of_write = {"--force": force, "--head-weights": head_weights}
    of_folder = {"--write": write, "--quick": quick, "--device": device, **of_write}
    if against is not None:
        _refuse(of_folder, "it and --against do not go together: the server has the model")

        from treeward.client.verification import verify_server
        from treeward.openai_client import key_from

        result = verify_server(
            model,
            against,
            dialect=dialect or "treeward",
            model=served_model,
            form=send,
            dtype=dtype,
            token=key_from(token_env),
            extra=None if body is None else parse_yaml(body, "--body", names=False),
            timeout_seconds=timeout or 60.0,
            verify_tls=True if tls_ca is None else tls_ca,
            trust_remote_code=trust_remote_code,
        )
        served = "" if result.served_model is None else f", model {result.served_model}"
        _show(result, f"{result.against} (as {result.dialect}, {result.form} sent{served})", as_json=as_json)
        return 0 if result.equal else 1
    _refuse(of_server, "it needs --against URL")
    if not write:
        _refuse(of_write, "it needs --write")

    from treeward.model.pretrained import DTYPES
    from treeward.scoring.verification import verify

    check_device(device)
    if write:
        _write(model, head_weights, force=force, device=device, trust_remote_code=trust_remote_code)
    found = verify(model, quick=quick, device=device, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    return _show_folder(found, as_json=as_json)


def _show_folder(found: Verification, *, as_json: bool) -> int:
    """Show what was found in a folder; the exit code."""
    _show(found, found.model, as_json=as_json)
    if found.equal and not found.num_tensors and not as_json:
        sys.stdout.write("The other tensors were not hashed, now or when the contract was written: of them only what "
                         "moves a golden score is seen.\n")  # fmt: skip
    if not found.could_compare:
        return 2
    return 0 if found.first_difference is None else 1


def _refuse(options: dict[str, Any], why: str) -> None:
    for option, value in options.items():
        if value:
            raise ConfigError("the option has no meaning here", where=option, need=why)


def _show(result: Verification | ServerVerification, name: str, *, as_json: bool) -> None:
    """The result of `name`: every check, then the first difference, or that all is equal."""
    first = result.first_difference
    if as_json:
        content = dataclasses.asdict(result) | {"equal": result.equal, "first_difference": first and first.part}
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return
    rows = [{"part": check.part, "state": check.state, "finding": check.summary} for check in result.checks]
    write_table(rows, ["part", "state", "finding"])
    if first is not None:
        details = {"got": first.got, "need": first.need, "fix": first.fix}
        lines = [f"{name}: what differs first is the {first.part}: {first.summary}"]
        lines += [f"  {label + ':':6} {value}" for label, value in details.items() if value is not None]
    elif result.largest_difference is None:
        lines = [f"{name}: nothing differs, but there are no golden scores to replay."]
    else:
        lines = [f"{name}: equal: {result.num_scores} golden scores, to within {result.largest_difference:.1e}; up to "
                 f"{result.tolerance:.1e} is rounding."]  # fmt: skip
    sys.stdout.write("\n".join(["", *lines]) + "\n")


def _write(model: str, head_weights: str | None, *, force: bool, device: str | None, trust_remote_code: bool) -> None:
    import torch

    from treeward.model.contract import CONTRACT_FILE, read_contract
    from treeward.model.pretrained import quiet_transformers
    from treeward.scoring.golden import sign_folder

    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            "a contract is written into a folder",
            where="--write",
            got=model,
            need="a model folder on this machine",
            fix=f"hf download {model} --local-dir FOLDER, then treeward verify FOLDER --write",
        )
    path = folder / CONTRACT_FILE
    if path.exists() and not force:
        raise ConfigError(
            "there is a contract already",
            where=str(path),
            need="a folder without one",
            fix="verify it (without --write); --force replaces it, and with it any record of what the scores were",
        )
    quiet_transformers()
    try:
        before = read_contract(folder)
    except ModelError as error:
        logger.warning("The contract that is replaced cannot be read, so nothing of it is kept: %s", error.summary)
        before = None
    contract = sign_folder(
        folder,
        like=before,
        heads=_heads(head_weights, folder, before, trust_remote_code),
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        trust_remote_code=trust_remote_code,
    )
    logger.info("Wrote %s, of %d golden conversations.", path, len(contract.golden))
    if before is not None and before.calibration is not None:
        logger.warning("Its calibration is left out: treeward calibrate %s --data FILE fits a new one.", folder)


def _heads(
    head_weights: str | None, folder: Path, before: ScoringContract | None, trust_remote_code: bool
) -> list[HeadContract]:
    """The heads of the score: as given, as in the contract before, or the one label."""
    from treeward.scoring.golden import head_labels, weighted_heads

    labels = head_labels(folder, trust_remote_code=trust_remote_code)
    if head_weights is not None:
        return weighted_heads(labels, _weights(head_weights))
    if before is not None and len(before.heads) == len(labels):
        return before.heads
    if len(labels) == 1:
        return weighted_heads(labels, [1.0])
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
        if not any(equals for _, equals, _ in pairs):
            return [float(value) for _, _, value in pairs]
        weights = {name.strip(): float(value) for name, equals, value in pairs if equals}
        if len(weights) == len(pairs):
            return weights
    except ValueError:
        pass
    need = "name=1,other=0.5 (each name once), or a number for each label, as 1,0.5"
    raise ConfigError("the weights of the heads cannot be read", where="--head-weights", got=text, need=need)
