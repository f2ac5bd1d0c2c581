"""`Asker`: an environment that is asked in threads which may be given up, so that one that hangs does not hang the run.

    asker = Asker("judge", environment)              # or the handle of its Ray actor
    question = asker.ask(conversations, infos, update=True)              # begins at once
    outcome = asker.outcome(question, deadline)      # EnvironmentReturn, an exception, or None: the time is up
    asker.keep(question)                             # its statistics count from now on

A thread cannot be killed. One that was given up goes on by itself; when it ends, its result is dropped and the
environment gets back the state that it had before. Until then nobody else asks the environment: the next question waits
for the thread, within its own time. `state` is always that of the last question that was kept, so that a run can be
saved whatever its environments do.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from treeward.data.preference import Message
from treeward.environments.interface import Environment, EnvironmentReturn
from treeward.errors import CheckpointError, ConfigError, ModelError

__all__ = ["STOPS", "Asker", "Question"]

STOPS = (ConfigError, ModelError, CheckpointError)
"""What is wrong with an environment itself, and will be so in the next step."""

logger = logging.getLogger(__name__)


class _Outcome(NamedTuple):
    result: EnvironmentReturn
    state: dict[str, Any]


class Question(threading.Thread):
    """A step of an environment, in a daemon thread: one that hangs does not keep the process alive."""

    def __init__(
        self,
        asker: Asker,
        conversations: Sequence[Sequence[Message]],
        infos: Sequence[Mapping[str, Any]],
        update: bool,
        after: Question | None,
    ) -> None:
        super().__init__(name=f"treeward-{asker.name}", daemon=True)
        self.conversations, self.infos, self.update = conversations, infos, update
        self.outcome: _Outcome | BaseException | None = None
        self.given_up = threading.Event()
        self._asker, self._after = asker, after

    def run(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None
        self._asker.run(self)


class Asker:
    """Asks one environment, one question at a time. `num_hangs`: how many in succession got no rewards in time.

    Made of an actor's handle, it waits until the actor has its environment, and raises what is wrong with it.
    """

    def __init__(self, name: str, environment: Environment | Any) -> None:
        self.name = name
        is_actor = hasattr(environment.step, "remote")
        self.environment: Environment | _Remote = _Remote(name, environment) if is_actor else environment
        self.num_hangs = 0
        self._lock = threading.Lock()
        self._state = copy.deepcopy(self.environment.state_dict())
        self._running = False
        self._last: Question | None = None

    def ask(
        self, conversations: Sequence[Sequence[Message]], infos: Sequence[Mapping[str, Any]], *, update: bool
    ) -> Question:
        """Begin a step. Its rewards are fetched by `outcome`, or it is given up by `give_up`."""
        after = self._last if self._last is not None and self._last.is_alive() else None
        self._last = question = Question(self, conversations, infos, update, after)
        question.start()
        return question

    def outcome(self, question: Question, deadline: float | None) -> EnvironmentReturn | BaseException | None:
        """What the step gave or raised; None where it has neither by `deadline` (monotonic clock), and is given up."""
        question.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        self.give_up(question)
        self.num_hangs = self.num_hangs + 1 if question.outcome is None else 0
        return question.outcome.result if isinstance(question.outcome, _Outcome) else question.outcome

    def give_up(self, question: Question) -> None:
        """Drop what the question gives later, and what it does to the state."""
        with self._lock:
            if question.outcome is None:
                question.given_up.set()

    def keep(self, question: Question) -> None:
        """The state after this question is the environment's from now on."""
        if isinstance(question.outcome, _Outcome):
            self._state = question.outcome.state

    @property
    def state(self) -> dict[str, Any]:
        """The environment's state after the last question that was kept."""
        return copy.deepcopy(self._state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; a step that is still running is undone to it."""
        with self._lock:
            if not self._running:
                self.environment.load_state_dict(copy.deepcopy(dict(state)))
            self._state = copy.deepcopy(dict(state))

    def undo(self, question: Question) -> None:
        """Bring back the state before a question that was asked and is not kept."""
        if isinstance(question.outcome, _Outcome):
            with self._lock:
                self._restore()

    def run(self, question: Question) -> None:
        """Do the step, in the thread of `question`."""
        with self._lock:
            if question.given_up.is_set():
                return
            self._running = True
        outcome: _Outcome | BaseException
        try:
            result = self.environment.step(question.conversations, question.infos, update=question.update)
            outcome = _Outcome(result, copy.deepcopy(self.environment.state_dict()))
        except BaseException as error:  # whatever it is, who asked waits for it
            outcome = error
        with self._lock:
            self._running = False
            failure = None
            if question.given_up.is_set() or isinstance(outcome, BaseException):
                failure = self._restore()
            if question.given_up.is_set():
                logger.info("%s has finished a step that was given up; its rewards are dropped.", self.name)
            else:
                question.outcome = outcome if failure is None or isinstance(outcome, STOPS) else failure

    def shutdown(self, seconds: float) -> bool:
        """Free what the environment holds; False where it does not manage to in time. An actor is then killed."""
        done: list[bool] = []

        def free() -> None:
            try:
                done.append(self.environment.shutdown())
            except Exception as error:
                logger.warning("%s did not shut down: %s: %s", self.name, type(error).__name__, error)
                done.append(False)

        thread = threading.Thread(target=free, name=f"treeward-{self.name}-shutdown", daemon=True)
        thread.start()
        thread.join(seconds)
        if not done:
            logger.warning("%s did not shut down; it had %g seconds", self.name, seconds)
            if isinstance(self.environment, _Remote):
                self.environment.kill()
        return bool(done) and done[0]

    def _restore(self) -> ModelError | None:
        """Load the last state that was kept; what keeps it from being loaded must not be trained on."""
        try:
            self.environment.load_state_dict(copy.deepcopy(self._state))
        except Exception as error:
            failure = ModelError(
                "the environment cannot go back to the state that it had before a step that failed",
                where=self.name,
                got=f"{type(error).__name__}: {error}",
                need="the state, so that the step can be done again",
                fix="resume from the last checkpoint",
            )
            failure.__cause__ = error
            logger.warning("%s", failure)
            return failure
        return None


class _Remote:
    """The Ray actor of an environment, with the methods of one. It raises what the environment raises."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self._handle = name, handle
        self._ray = importlib.import_module("ray")

    def step(self, conversations: Any, infos: Any, *, update: bool) -> EnvironmentReturn:
        result: EnvironmentReturn = self._call("step", conversations, infos, update=update)
        return result

    def state_dict(self) -> dict[str, Any]:
        return dict(self._call("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict", state)

    def shutdown(self) -> bool:
        done = bool(self._call("shutdown"))
        self._handle = None  # the actor ends with its last handle
        return done

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # Ray may be gone already
            self._ray.kill(self._handle)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(getattr(self._handle, method).remote(*arguments, **options))
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except exceptions.ActorUnavailableError:
            raise  # it may be back for the next step
        except exceptions.RayActorError as error:
            raise ModelError(
                "the Ray actor of the environment is gone",
                where=self.name,
                got=str(error).splitlines()[0],
                need="an actor that lives",
                fix="look for the reason in Ray's logs, and resume the run",
            ) from error
