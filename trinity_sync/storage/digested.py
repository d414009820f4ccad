"""JSON that carries a digest of itself: what a disk has altered is not taken for what was written.

For small records that decide what may be resumed from or removed, and are read one by one. Those
of versions before the digest are read as they are.
"""

import hashlib
import json
from typing import Any


def to_text(body: dict[str, Any]) -> str:
    """The record as text, with its digest."""
    return json.dumps({**body, "digest": _digest(body)})


def from_text(text: str) -> dict[str, Any]:
    """The record in a text of `to_text`.

    Raises:
        ValueError: it is torn, or was altered.
    """
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError("it is no record")
    digest = body.pop("digest", None)
    if digest is not None and digest != _digest(body):
        raise ValueError("it was altered")
    return body


def _digest(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
