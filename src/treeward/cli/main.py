"""`treeward VERB ...`: finds the verb's module, and turns a user's mistake into one message and
exit code 2.

A verb is a module of `treeward.cli` whose `run` is a typer command that returns the exit code; the
module's docstring, after its first line, is shown at the end of its help. Only the module of the
verb that was named is imported, so `--help` answers at once.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from treeward.errors import TreewardError
from treeward.progress import configure_logging
from treeward.version import VERSION

VERBS = {
    "train": "Train a reward model on comparisons.",
    "check-data": "Find what is wrong with comparisons, before training on them.",
    "check-labels": "Find comparisons whose labels look wrong, with what any model sees in them.",
    "plan": "Estimate the memory of a run, without a GPU.",
    "score": "Score conversations with a reward model.",
    "eval": "Measure the accuracy and the biases of reward models, and write a report.",
    "compare": "Test whether one evaluated model is significantly better than another.",
    "bon": "Measure best-of-n sampling: what a reward model chooses, by a gold reward.",
    "grpo": "Optimise a policy against a reward model, and watch for its exploitation.",
    "serve": "Serve reward models over HTTP, in the API formats that RL frameworks use.",
    "verify": "Check that a model, here or on a server, gives the scores of its contract.",
    "calibrate": "Fit the constants that turn scores into rewards, and keep them with the model.",
}


class _Verbs(TyperGroup):
    """Lists verbs by their summaries, and imports the one that is called or completed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Without their options: these need the module of the verb.
        for verb, summary in VERBS.items():
            self.commands[verb] = TyperCommand(verb, short_help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, words = super().resolve_command(ctx, args)
        # None while a shell completes a word that is no verb yet.
        if name is not None:
            command = verb_command(name)
        return name, command, words


app = typer.Typer(cls=_Verbs, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, help="Show the version and exit."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks and more log messages."),
    ] = False,
) -> None:
    """Train reward models, find out what they learnt, and use them. Each prompt is computed once.

    `treeward COMMAND --help` shows the options of a command, with examples.
    """


def keep_freed_memory() -> None:
    """Have glibc keep what tensors of up to 32 MB free: each page that comes anew costs a fault,
    which took a tenth of the time of a small model on a CPU.
    """
    # There is none on a Mac.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # The numbers are those of malloc.h. The threshold is the most that it takes.
        trim_threshold = -1
        mmap_threshold = -3
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, (2 << 30) - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    0: done; 1: done in part; 2: a mistake that the user can fix; 128 + n: ended by the signal n.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout.isatty():
            # A terminal may lack the character of the line below a heading.
            sys.stdout.reconfigure(errors="replace")
        else:
            # In a file or a pipe no row may change.
            sys.stdout.reconfigure(encoding="utf-8")
    if words == ["--version"]:
        sys.stdout.write(f"treeward {VERSION}\n")
        return 0
    keep_freed_memory()
    # Else the last collections go through all of torch, for most of a second.
    atexit.register(gc.freeze)
    # The option may stand before the verb or after it, so no verb declares it.
    configure_logging(debug="--debug" in words)
    try:
        app([word for word in words if word != "--debug"], prog_name="treeward")
    except SystemExit as end:
        # click ends every command by this, also one that succeeds.
        return int(end.code or 0)
    return 0


def verb_command(verb: str) -> TyperCommand:
    """The command of a verb with its options; imports its module."""
    module = importlib.import_module(f"treeward.cli.{verb.replace('-', '_')}")
    paragraphs = str(module.__doc__).strip().split("\n\n")
    # click fills paragraphs, except those that begin with \b: examples keep their lines.
    examples = "\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs[1:])
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(verb, help=VERBS[verb], epilog=examples)(_reporting(verb, module.run))
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    return command


def _reporting(verb: str, run: Callable[..., int]) -> Callable[..., None]:
    """`run`, with its exit code; errors for users, and those of files and networks, are messages,
    not tracebacks.
    """

    @functools.wraps(run)
    def reporting(**options: Any) -> None:
        try:
            with _interrupted_by_signals():
                code = run(**options)
        except (TreewardError, OSError, KeyboardInterrupt) as error:
            # As in `treeward score ... | head`: the reader has enough, which is no failure.
            if isinstance(error, BrokenPipeError) and _stdout_closed():
                raise typer.Exit(0) from None
            # Only the first process of torchrun on each node writes the error.
            if os.environ.get("LOCAL_RANK", "0") != "0":
                raise typer.Exit(2) from None
            if logging.getLogger("treeward").isEnabledFor(logging.DEBUG):
                traceback.print_exc()
            code = 2
            text = f"treeward {verb}: {error}\n"
            if isinstance(error, KeyboardInterrupt):
                number = error.number if isinstance(error, _Interrupted) else signal.SIGINT
                code = 128 + number
                # On a line of its own, after the ^C of the terminal.
                text = f"\ntreeward {verb}: interrupted\n"
            elif isinstance(error, OSError):
                text += f"  fix:   treeward --debug {verb} ... shows where it comes from\n"
            # The terminal may have been closed, which is what SIGHUP says.
            with suppress(OSError):
                sys.stderr.write(text)
        raise typer.Exit(code)

    return reporting


class _Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a verb as Ctrl-C does: files are closed, and what is done is
    told.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise `_Interrupted`. A run has a gentler `StopRequest`
    within it, and the server its own handlers.
    """
    own_process = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() == own_process:
            raise _Interrupted(number)
        # A worker that was forked here: whoever ends it expects that it ends by the signal.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    numbers: list[signal.Signals] = []
    # A process of torchrun may wait for others within a call that no exception leaves.
    is_alone = "LOCAL_RANK" not in os.environ
    if is_alone and threading.current_thread() is threading.main_thread():
        # What was ignored at the start, as by nohup, stays ignored.
        signals = (signal.SIGTERM, signal.SIGHUP)
        numbers = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _stdout_closed() -> bool:
    """Whether standard output is a pipe that nobody reads any more (head has gone), and not another
    pipe broke.
    """
    try:
        # What had failed to be written may be gone from its buffer.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes it again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
