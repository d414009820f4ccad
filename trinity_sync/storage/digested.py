"""JSON that carries a digest of itself: what a disk has altered is not taken for what was written.

For small records that decide what may be resumed from or removed, and are read one by one.
"""

import json
from typing import Any

from trinity_sync.snapshot.notes import digest_of_body, load_object


def to_text(body: dict[str, Any]) -> str:
    """The record as text, with its digest."""
    return json.dumps({**body, "digest": digest_of_body(body)})


def from_text(text: str | bytes) -> dict[str, Any]:
    """The record in a text of `to_text`.

    Raises:
        ValueError: it is torn, was altered, or has no digest.
    """
    body = load_object(text)
    if body.pop("digest", None) != digest_of_body(body):
        raise ValueError("it was altered")
    return body
