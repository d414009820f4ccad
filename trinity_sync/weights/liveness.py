"""Liveness of trainers and explorers that are Ray actors.

Ray does not report the death of an actor, so each is probed, one call at a time: a busy actor
answers late, a dead one never.
"""

import asyncio
from collections.abc import Collection
from typing import Any

PROBE_S = 1.0
"""Seconds between two probes of a member that others wait for."""


class Liveness:
    """Liveness of the actors of one Ray namespace.

    ``known`` are the names that are known to be actors, also from an earlier process; the caller
    updates it.
    """

    def __init__(self, namespace: str, known: Collection[str]) -> None:
        self._namespace, self._known = namespace, known
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, asyncio.Task[bool]] = {}
        """Actor -> the probe that is in flight, or the last one."""

    async def look_up(self, name: str) -> bool:
        """Look up a live actor by name, since a dead one is not found; return whether it exists."""
        actor = await find_actor(name, self._namespace)
        if actor is None:
            return False
        before = self._actors.get(name)
        self._actors[name] = actor
        if before is not None and before != actor:
            self._asked.pop(before, None)
        return True

    def is_dead(self, name: str) -> bool:
        """Return whether the actor has died by its last probe, and start the next one.

        False for a name that never was an actor of the namespace. A known actor that `look_up` did
        not find has died between two probes.
        """
        actor = self._actors.get(name)
        if actor is None:
            return name in self._known
        asked = self._asked.get(actor)
        if asked and not asked.done():
            return False
        if asked and asked.result():
            del self._actors[name], self._asked[actor]
            return True
        self._asked[actor] = asyncio.get_running_loop().create_task(wait_for_death(actor))
        return False


async def find_actor(name: str, namespace: str) -> Any:
    """Return a Ray actor, or None, without blocking the event loop."""
    import ray

    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace)
    except ValueError:
        return None


async def wait_for_death(actor: Any) -> bool:
    """Wait until the actor answers or dies; return whether it died."""
    import ray

    try:
        await actor.__ray_ready__.remote()
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        return False  # it is being restarted, or cannot be reached just now
    return False
