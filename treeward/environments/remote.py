"""`RemoteEnvironment`: an environment in a Ray actor, with the methods of one in this process.

RemoteEnvironment("rewards_env", ray.get_actor("rewards")).step(message_logs, env_infos)
"""

from __future__ import annotations

import logging
from typing import Any

from treeward.environments.interface import Conversations, Environment, Infos, Reward
from treeward.errors import ModelError

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 30.0


class RemoteEnvironment(Environment):
    """The environment of an actor's `handle`, under a name of its own. It raises the errors of that environment."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self._handle = name, handle

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        return list(self._call("rewards", conversations, env_infos))

    def shutdown(self) -> bool:
        """Free models and workers; an actor that does not answer is killed."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        handle, self._handle = self._handle, None  # the actor ends with its last handle
        try:
            return handle is None or bool(ray.get(handle.shutdown.remote(), timeout=_SHUTDOWN_SECONDS))
        except (GetTimeoutError, RayActorError) as error:
            logger.warning("%s did not shut down and is killed: %s", self.name, str(error).splitlines()[:1])
            ray.kill(handle)
            return False

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

        try:
            return ray.get(getattr(self._handle, method).remote(*arguments))
        except RayTaskError as error:
            raise error.cause from None
        except ActorUnavailableError:
            raise  # it may be back for the next step
        except RayActorError as error:
            raise ModelError(
                "the Ray actor of the environment is gone",
                where=self.name,
                got=str(error).splitlines()[0],
                fix="resume the run",
            ) from error


def as_environment(environment: Any, name: str = "environment") -> Environment:
    """An environment as it is; the handle of a Ray actor as a `RemoteEnvironment`, under `name`."""
    return environment if isinstance(environment, Environment) else RemoteEnvironment(name, environment)
