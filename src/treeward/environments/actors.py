"""`RayActor`: a class whose objects may live in Ray actors.

    environment = RewardModelEnvironment.remote(env_config)     # as without `remote`, in an actor
    environment = RewardModelEnvironment.options(name="rewards").remote(env_config)
    ray.get(environment.step.remote(message_logs, env_infos))

The actor has every public method of the class. An error in its constructor, as for a faulty
configuration or a missing model, is the reason of Ray's `ActorDiedError`. Ray does not restart the
actor unless `max_restarts` asks for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from treeward.parallel.ray_cluster import start_ray


class RayActor:
    """Gives a class `remote` and `options`, as `@ray.remote` would, while it stays a class."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object in a Ray actor and return the actor's handle. Starts Ray where it is not
        running."""
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **ray_options: Any) -> Any:
        """Ray's class of the actor, with options of Ray's `ActorClass.options`, as `name` or
        `max_restarts`.

        Raises `ConfigError` if Ray is not installed.
        """
        # Without a number Ray would place the actor only where a CPU is free.
        return start_ray().remote(_plain(cls)).options(**{"num_cpus": 0, **ray_options})


def _plain(cls: type[RayActor]) -> type:
    """A class with the public methods of `cls`, but for `remote` and `options`, which Ray has
    itself."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        self.object = cls(*args, **kwargs)

    body: dict[str, Any] = {
        "__init__": construct,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
    }

    def forwarding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)  # Ray reads the signature
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.object, name)(*args, **kwargs)

        return call

    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            body[name] = forwarding(name, method)
    return type(cls.__name__, (), body)
