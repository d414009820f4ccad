"""Which trainers and explorers live, of those that are Ray actors.

Ray tells of no death unasked, so each is asked, one question at a time: one that is busy answers
late, one that is dead never does.
"""

import asyncio
from collections.abc import Collection
from typing import Any

PROBE_S = 1.0
"""How often a party that others wait for is looked at."""


class Liveness:
    """Of the actors of one Ray namespace.

    Args:
        namespace: theirs.
        known: names of those that were seen to be actors, by an earlier process, too; kept by the
            caller.
    """

    def __init__(self, namespace: str, known: Collection[str]) -> None:
        self._namespace, self._known = namespace, known
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, asyncio.Task[bool]] = {}
        """Actor -> the question that it has not answered yet, or its last answer."""

    async def note(self, name: str) -> bool:
        """Look the actor up while it lives, since a dead one is not found; whether it was."""
        actor = await find(name, self._namespace)
        if actor is None:
            return False
        before = self._actors.get(name)
        self._actors[name] = actor
        if before is not None and before != actor:
            self._asked.pop(before, None)
        return True

    def is_dead(self, name: str) -> bool:
        """Whether the actor of that name has died; asks it, for the next look at it.

        False for who never was an actor of the namespace: nobody can tell. One that was, and that
        `note` did not find, has died while nobody looked.
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
        self._asked[actor] = asyncio.get_running_loop().create_task(died(actor))
        return False


async def find(name: str, namespace: str) -> Any:
    """The Ray actor of that name, or None; the event loop goes on meanwhile."""
    import ray

    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace)
    except ValueError:
        return None


async def died(actor: Any) -> bool:
    """Whether the actor is dead; returns when it has answered, or has died without."""
    import ray

    try:
        await actor.__ray_ready__.remote()
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        return False  # it is being restarted, or cannot be reached just now
    return False
