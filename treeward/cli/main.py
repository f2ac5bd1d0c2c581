"""`treeward VERB ...`: finds the verb's module, and turns a user's mistake into one message and exit code 2.

A verb is a module of `treeward.cli` with `SUMMARY`, `add_arguments(parser)` and `run(arguments) -> exit code`. Only the
module of the verb that was named is imported, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from treeward import __version__
from treeward.cli.logging import configure_logging
from treeward.errors import TreewardError

__all__ = ["main"]

VERBS = {
    "train": "train a reward model from a configuration",
    "score": "score conversations with a reward model",
    "eval": "evaluate reward models on suites or comparisons, and write a report",
    "compare": "say whether one evaluated model is better than another",
    "bon": "draw best-of-n curves of a reward model against a gold reward",
    "grpo": "optimise a policy against a reward model, and watch for its exploitation",
    "serve": "serve reward models over HTTP, in the dialects that RL frameworks speak",
    "rollouts": "collect answers of a language model, with their rewards",
    "verify": "replay a model's scoring contract and name what differs",
    "calibrate": "fit a reward model's normalisation, length curve and temperature",
    "merge": "average the weights of reward models",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 done in part, 2 a mistake to mend, 128 + n signal n."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb not in VERBS:
        parser.parse_args(words)  # --help, --version, or an error that lists the verbs
        parser.print_help()
        return 2
    debug = "--debug" in words
    try:
        code: int = _run(verb, words)
        return code
    except TreewardError as error:
        if debug:
            traceback.print_exc()
        else:
            sys.stderr.write(f"treeward {verb}: {error}\n")
        return 2
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"\ntreeward {verb}: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output (head, say) has enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(verb: str, words: list[str]) -> int:
    module = importlib.import_module(f"treeward.cli.{verb}")
    subparser = argparse.ArgumentParser(
        prog=f"treeward {verb}",
        description=f"{VERBS[verb][0].upper()}{VERBS[verb][1:]}.",
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(subparser)
    subparser.add_argument("--debug", action="store_true", help="show tracebacks and more log messages")
    at = words.index(verb)
    # intermixed: overrides may stand before, between and after options
    parsed = subparser.parse_intermixed_args(words[:at] + words[at + 1 :])
    configure_logging("DEBUG" if parsed.debug else "INFO")
    code: int = module.run(parsed)
    return code


def _parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {name:<10} {summary}" for name, summary in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="treeward",
        usage="treeward VERB [arguments]",
        description="Train, examine and use reward models; the prompt is computed once.",
        epilog=f"verbs:\n{verbs}\n\n`treeward VERB --help` shows a verb's arguments and examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treeward {__version__}")
    parser.add_argument("verb", nargs="?", choices=VERBS, metavar="VERB", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
