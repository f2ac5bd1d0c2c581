"""`RayActor`: a class whose objects may live in Ray actors.

    environment = RewardModelEnvironment.remote(env_config)       # RewardModelEnvironment(env_config), in an actor
    environment = RewardModelEnvironment.options(name="rewards").remote(env_config)
    ray.get(environment.step.remote(message_logs, env_infos))

The actor has every public method of the class. A faulty configuration raises in the caller's process at once; an error
in the actor's constructor (a missing model) is raised by each of its methods. Ray does not restart the actor unless
`max_restarts` asks for it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treeward.errors import TreewardError
from treeward.parallel.ray_cluster import start_ray

logger = logging.getLogger(__name__)


class RayActor:
    """Gives a class `remote` and `options`, as `@ray.remote` would, while it stays a class."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object in a Ray actor and return the actor's handle. Starts Ray where it is not running."""
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **ray_options: Any) -> RemoteFactory:
        """`remote` with options of Ray's `ActorClass.options`, as `name` or `max_restarts`."""
        return RemoteFactory(cls, ray_options)

    @classmethod
    def check_remote(cls, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the actor's object, checked in the caller's process. Raises `ConfigError`."""
        return args, kwargs


@dataclass(frozen=True)
class RemoteFactory:
    """A class and the Ray options of its actor."""

    cls: type[RayActor]
    ray_options: Mapping[str, Any]

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Make the actor. Raises `ConfigError` for a faulty configuration, or if Ray is not installed."""
        args, kwargs = self.cls.check_remote(*args, **kwargs)
        options = {"num_cpus": 0} | dict(self.ray_options)  # the actor's own work needs no CPU
        return start_ray().remote(_deferring(self.cls)).options(**options).remote(*args, **kwargs)


def _deferring(cls: type[RayActor]) -> type:
    """A class with the public methods of `cls`, which raise the constructor's error: Ray would keep only its text."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        self.error = None
        try:
            self.object = cls(*args, **kwargs)
        except TreewardError as error:
            self.error = error

    body: dict[str, Any] = {"__init__": construct, "__doc__": cls.__doc__, "__module__": cls.__module__}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if not name.startswith("_") and inspect.isfunction(member):
            body[name] = _forwarding(name, member)
    return type(cls.__name__, (), body)


def _forwarding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.error is None:
            return getattr(self.object, name)(*args, **kwargs)
        if name == "shutdown":
            return True  # there is nothing to free
        raise self.error

    return call
