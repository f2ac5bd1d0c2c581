"""`PromptRouter`: Ray Serve sends calls with one key to one replica, as long as it is not overloaded.

    RequestRouterConfig(request_router_class="treeward.serving.prompt_router.PromptRouter")
    handle.score.remote(key, ...)       # a call's first argument is its key

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018, arXiv 1608.01350), where each key has
its own order of the replicas: a replica that comes or goes moves only the keys that it gets, or had. Serve copies this
module by value into its processes, so it has no state and imports nothing of treeward.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_BALANCE = 1.25
"""A replica is overloaded at this multiple of the mean load."""
_SLACK = 32
"""No replica is overloaded with fewer calls, so that a few requests for one prompt are not spread."""


class PromptRouter(RequestRouter):
    """Routes by `ranked`; each router counts the calls that it has sent."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order to try."""
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # between one round of all of them and the next
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        key = str(next(iter(pending_request.args), ""))
        return [[replicas[name]] for name in ranked(key, loads)]


def ranked(key: str, loads: Mapping[str, int]) -> list[str]:
    """The replicas in the order of the key, overloaded ones last. `loads`: calls in progress at each."""
    most = max(_SLACK, math.ceil(_BALANCE * (sum(loads.values()) + 1) / max(1, len(loads))))

    def rank(name: str) -> tuple[bool, bytes]:
        return loads[name] >= most, hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest()

    return sorted(loads, key=rank)
