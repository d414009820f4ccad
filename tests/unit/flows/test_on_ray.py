"""How functions run in Ray processes; whole flows run in tests/integration."""

import asyncio
import pickle
from pathlib import Path

import pytest
from prefect.states import exception_to_failed_state

from tasks.save import repeat
from trinity_sync.errors import RemoteError, SaveError
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.on_node import RemoteTracebackError, call
from trinity_sync.pipeline.save import UPLOAD, Part, Share, is_io_error
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.uncommitted import Persisted


def write_on_a_full_disk() -> None:
    try:
        raise OSError(28, "No space left on device", "/ckpts/a.pt")
    except OSError as error:
        raise SaveError("cannot write /ckpts/a.pt") from error


def fail() -> None:
    raise KeyError("unexpected")


def test_an_error_in_a_ray_process_keeps_its_class_and_a_cause_that_can_be_pickled() -> None:
    outcome = pickle.loads(pickle.dumps(call(None, write_on_a_full_disk)))
    with pytest.raises(SaveError, match="cannot write") as failed:
        outcome.unwrap()
    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.__cause__.errno == 28
    outcome = pickle.loads(pickle.dumps(call(None, fail_to_sync)))
    with pytest.raises(OSError, match="Input/output") as failed:
        outcome.unwrap()
    assert is_io_error(failed.value)
    outcome = pickle.loads(pickle.dumps(call(None, fail_in_an_http_client)))
    with pytest.raises(RemoteError, match="does not answer"):
        outcome.unwrap()


def test_an_unexpected_error_in_a_ray_process_shows_where_it_was_raised() -> None:
    outcome = pickle.loads(pickle.dumps(call(None, fail)))
    with pytest.raises(KeyError, match="unexpected") as failed:
        outcome.unwrap()
    assert isinstance(failed.value.__cause__, RemoteTracebackError)
    assert 'raise KeyError("unexpected")' in str(failed.value.__cause__)


def fail_to_sync() -> None:
    raise OSError(5, "Input/output error", "/ckpts")


class UnpicklableError(Exception):
    """As those of HTTP clients, whose constructors take other arguments."""

    def __init__(self, message: str, *, request: object) -> None:
        super().__init__(message)


def fail_in_an_http_client() -> None:
    try:
        raise UnpicklableError("503", request=None)
    except UnpicklableError as error:
        raise RemoteError("the store does not answer") from error


@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (RemoteError("the store does not answer"), True),
        (RuntimeError("can't start new thread"), True),
        (NotImplementedError("a protocol"), False),
        (SaveError("the step is corrupted"), False),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_task_is_repeated_after_what_the_saver_repeats(
    error: Exception, is_repeated: bool
) -> None:
    async def ask() -> bool:
        failed = await exception_to_failed_state(error)
        return bool(await repeat(UPLOAD)["retry_condition_fn"](None, None, failed))

    assert asyncio.run(ask()) is is_repeated


def test_a_node_repeats_what_failed_with_an_io_error_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def persist_share(request: SaveRequest, share: Share, *_: object) -> Persisted:
        tried.append(share.what)
        if tried.count("model") == 1 and share.component == "model":
            raise OSError(5, "Input/output error")
        if share.component == "optim":
            raise SaveError("is superseded")
        if share.component == "extra_state":
            raise UnpicklableError("503", request=None)
        return Persisted([], [])

    monkeypatch.setattr(on_node, "persist_share", persist_share)
    monkeypatch.setattr(on_node, "PERSIST", Part("persist", repeats_after=(0, 0)))
    request = SaveRequest(root=str(tmp_path), run=1, step=1)
    shares = [Share("model"), Share("optim"), Share("extra_state")]
    shards = NodeShards("a", str(tmp_path), {"actor": (0,)})
    outcomes = on_node.persist_node(request, shares, shards)
    model, optim, extra = pickle.loads(pickle.dumps(outcomes))
    assert model.unwrap().written == ()
    assert "is superseded" in str(optim.get_error())
    assert "503" in str(extra.get_error())  # it cannot be pickled, and leaves the others
    assert sorted(tried) == ["extra_state", "model", "model", "optim"]
