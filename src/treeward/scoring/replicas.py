"""`running`: replicas of a class that scores, as a deployment of Ray Serve.

    with running(Replica, config, name="rewards", num_replicas=4) as handle:
        handle.score.remote(conversations).result()

Serve places the replicas, watches them, and starts another for one that dies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve

from treeward.errors import ModelError

_QUIET = {"log_level": "WARNING", "enable_access_log": False}
"""For Serve's own loggers."""


@contextmanager
def running(cls: type, *arguments: Any, name: str, **options: Any) -> Iterator[Any]:
    """The handle of replicas in the Ray that runs, under the name of an application, until the context ends.

    `options`: of `serve.deployment`. Raises `ModelError` for replicas that do not start.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=_QUIET)
    deploy = serve.deployment(
        name="Replica", max_constructor_retry_count=1, logging_config=_QUIET, **options
    )
    try:
        try:
            handle = serve.run(deploy(cls).bind(*arguments), name=name, route_prefix=None)
        except RuntimeError:
            # with a traceback
            status = serve.status().applications[name].deployments["Replica"].message
            reason = status.rpartition("treeward.errors.")[2].strip()
            raise ModelError(f"the replicas do not start: {reason}") from None
        yield handle
    finally:
        serve.delete(name)
