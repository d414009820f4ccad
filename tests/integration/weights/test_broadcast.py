"""Weights over real gloo groups, each member a process of its own, some of which are killed."""

import os
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forked import forking
from tests.support.states import equal_bits
from trinity_sync import ConfigError, WeightSyncError
from trinity_sync.stack.daemon import free_port
from trinity_sync.weights.broadcast import receive_into, receive_weights, send_weights
from trinity_sync.weights.weight_group import (
    WeightGroup,
    WeightGroupHost,
    _create_backend,
    join_weight_group,
)

TIMEOUT_S, SHORT_S = 600.0, 4.0
"""Time-outs in seconds: of a group whose members all answer, and of one with a silent member."""
BUCKET = 1 << 16


def weights() -> dict[str, torch.Tensor]:
    """Of all sizes about a bucket's, of mixed dtypes, empty and without dimensions."""
    random = torch.Generator().manual_seed(0)
    sizes = [0, 1, 7, BUCKET // 4 - 4, BUCKET // 4, BUCKET // 4 + 1, 3 * BUCKET + 5, 12_345]
    made: dict[str, torch.Tensor] = {"scalar": torch.tensor(float("nan"))}
    for n, size in enumerate(sizes):
        made[f"fp32.{n}"] = torch.randn(size, generator=random)
        made[f"bf16.{n}"] = torch.randn(size, generator=random).to(torch.bfloat16)
        made[f"int8.{n}"] = torch.arange(size).to(torch.int8)
    made["part"] = torch.randn(2 * BUCKET + 1, generator=random).to(torch.bfloat16)[1:]
    made["matrix"] = torch.randn(33, 70, generator=random).t()
    for n in range(300):
        made[f"bias.{n}"] = torch.full((n % 3,), float(n))
    made["mask"] = torch.arange(100).reshape(4, 25) % 3 == 0
    return made


Program = Callable[[WeightGroup], Any]


def _reader(pipe: Any) -> None:
    """A process that joins the groups that it is told of."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        program, port, rank, size, timeout_s = job
        try:
            group = join_weight_group(
                "127.0.0.1", port, rank=rank, world_size=size, timeout_s=timeout_s
            )
            answer = program(group)
            group.close()
        except WeightSyncError as error:
            answer = error
        except BaseException:
            answer = traceback.format_exc()
        pipe.send(answer)


class Reader:
    """Our end of such a process."""

    def __init__(self) -> None:
        with forking(__name__) as context:
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_reader, args=(theirs,), daemon=True)
            self.process.start()
        theirs.close()
        self.owes = 0

    def join(
        self, program: Program, port: int, rank: int, size: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.pipe.send((program, port, rank, size, timeout_s))
        self.owes += 1

    def answer(self) -> Any:
        assert self.pipe.poll(120), "the reader hangs"
        self.owes -= 1
        return self.pipe.recv()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Reader]]:
    """Processes without a group, started when they are first needed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    made: list[Reader] = []
    yield made
    for reader in made:
        reader.process.kill()
        reader.process.join()


@pytest.fixture
def members(processes: list[Reader]) -> Iterator[Callable[..., tuple[WeightGroup, list[Reader]]]]:
    """Makes a group of this process, its rank 0, and one reader for each program."""
    groups = []

    def together(
        *programs: Program, timeout_s: float = TIMEOUT_S
    ) -> tuple[WeightGroup, list[Reader]]:
        processes[:] = [reader for reader in processes if reader.process.is_alive()]
        processes.extend(Reader() for _ in programs[len(processes) :])
        readers, host = processes[: len(programs)], WeightGroupHost(address="127.0.0.1")
        for reader in readers:
            reader.join(_nothing, host.port, 5, 1)  # refused: what matters is that it runs by now
            reader.answer()
        for rank, (reader, program) in enumerate(zip(readers, programs, strict=True), 1):
            reader.join(program, host.port, rank, len(programs) + 1, timeout_s)
        group = host.join(world_size=len(programs) + 1, timeout_s=timeout_s)
        groups.append(group)
        return group, readers

    yield together
    for group in groups:
        group.close()
    for reader in processes:
        if reader.owes:  # the next test would read this one's answer
            reader.process.kill()
            reader.process.join()


def _nothing(group: WeightGroup) -> None:
    pass


def _take_all(group: WeightGroup) -> Any:
    taken = []
    for _ in range(2):
        with receive_weights(group) as (version, tensors):
            taken.append((version, [(name, tensor.clone()) for name, tensor in tensors]))
    return taken


def test_every_tensor_comes_once_in_order_and_bit_equal(members: Any) -> None:
    group, readers = members(_take_all, _take_all)
    sent = weights()
    for version in (7, 8):
        send_weights(sent.items(), group, version=version, bucket_bytes=BUCKET)
    for reader in readers:
        for version, taken in zip((7, 8), reader.answer(), strict=True):
            assert taken[0] == version
            assert [name for name, _ in taken[1]] == list(sent)
            assert all(equal_bits(tensor, sent[name]) for name, tensor in taken[1])


def _into_own(group: WeightGroup) -> Any:
    state = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    state["tied"] = state["matrix"]
    return receive_into(state, group), {name: tensor.clone() for name, tensor in state.items()}


def test_a_state_is_filled_and_tied_names_need_not_come(members: Any) -> None:
    group, (reader,) = members(_into_own)
    sent = weights()
    send_weights(sent.items(), group, version=3, bucket_bytes=BUCKET)
    version, state = reader.answer()
    assert version == 3
    assert all(equal_bits(state[name], sent[name]) for name in sent)
    assert equal_bits(state["tied"], sent["matrix"])


def _tied() -> dict[str, torch.Tensor]:
    both = torch.zeros(2)
    return {"a": both, "b": both}


def _fused() -> dict[str, torch.Tensor]:
    fused = torch.zeros(4)
    return {"a": fused[:2], "fused": fused}


UNFIT: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "'b' is tied to another one here": _tied,
    "1 of 2 tensors were not sent, 'fused' first": _fused,
    "1 of 2 tensors were not sent, 'c' first": lambda: {"a": torch.zeros(2), "c": torch.zeros(2)},
    r"'a' is \[2\] at the trainer and \[2, 2\] here": lambda: {"a": torch.zeros(2, 2)},
    "a is on the meta device": lambda: {"a": torch.zeros(2, device="meta")},
    "a is expanded, with one place for several": lambda: {"a": torch.zeros(1).expand(2)},
}
"""What a reader fills, by the reason for which it cannot."""


def _into(why: str, group: WeightGroup) -> Any:
    return receive_into(UNFIT[why](), group)


@pytest.mark.parametrize("why", UNFIT)
def test_a_reader_that_cannot_use_the_weights_sends_the_trainer_its_reason(
    members: Any, why: str
) -> None:
    group, (reader,) = members(partial(_into, why))
    sent = {"a": torch.zeros(2)} | ({"b": torch.ones(2)} if "tied" in why else {})
    with pytest.raises(WeightSyncError, match=f"rank 1 gave up: .*{why}"):
        send_weights(sent.items(), group, version=3)
    assert isinstance(reader.answer(), WeightSyncError)
    with pytest.raises(WeightSyncError, match="can no longer use this weight group"):
        send_weights(sent.items(), group, version=4)


def _killed_in_the_middle(group: WeightGroup) -> Any:
    with receive_weights(group) as (_, tensors):
        for n, _ in enumerate(tensors):
            if n == 4:
                os.kill(os.getpid(), signal.SIGKILL)


def _take(group: WeightGroup) -> Any:
    with receive_weights(group) as (_, tensors):
        return [name for name, _ in tensors]


def test_a_reader_killed_in_mid_broadcast_ends_it_on_all_sides_for_one_reason(members: Any) -> None:
    group, readers = members(_killed_in_the_middle, _take, timeout_s=SHORT_S)
    large = (torch.zeros(1 << 20) for _ in range(200))
    with pytest.raises(WeightSyncError, match=r"rank 0 of 3 of .*: rank [02] gave up") as heard:
        send_weights(((f"w{n}", t) for n, t in enumerate(large)), group, version=3)
    assert str(readers[1].answer()) == str(heard.value).replace("rank 0 of 3", "rank 2 of 3")


def _silent(group: WeightGroup) -> None:
    group._store.wait(["failed"], timedelta(seconds=TIMEOUT_S))


def test_a_broadcast_to_a_reader_that_hangs_ends_by_its_time_out(members: Any) -> None:
    group, (reader,) = members(_silent, timeout_s=SHORT_S)
    with pytest.raises(WeightSyncError, match=f"a member did not answer within {SHORT_S:g} s"):
        send_weights([("w", torch.zeros(3))], group, version=3)
    assert reader.answer() is None


def test_a_group_that_is_left_during_a_call_holds_no_process_at_its_exit(members: Any) -> None:
    before = {*threading.enumerate()}
    group, _ = members(_silent)
    group.broadcast(torch.zeros(1 << 24))
    group.close()
    assert all(each.daemon for each in {*threading.enumerate()} - before)


def test_a_dead_trainer_ends_the_wait_of_its_readers(members: Any) -> None:
    group, (reader,) = members(_take)
    group.close()
    assert "rank 0, the trainer's, is gone" in str(reader.answer())


def test_a_trainer_that_sends_nothing_ends_the_wait_of_its_readers(members: Any) -> None:
    _, (reader,) = members(_take, timeout_s=SHORT_S)
    assert f"rank 1 gave up: rank 0 sent nothing for {SHORT_S:g} s" in str(reader.answer())


def test_the_port_of_a_host_cannot_be_taken_before_the_trainer_joins() -> None:
    host = WeightGroupHost(address="127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", host.port))
    with pytest.raises(WeightSyncError, match=f"cannot listen on 127.0.0.1:{host.port} "):
        WeightGroupHost(host.port, "127.0.0.1")

    def receive() -> list[tuple[str, list[int]]]:
        joined = join_weight_group(
            host.address, host.port, rank=1, world_size=2, timeout_s=TIMEOUT_S
        )
        with receive_weights(joined) as (_, tensors):
            return [(name, tensor.tolist()) for name, tensor in tensors]

    with ThreadPoolExecutor() as pool:
        received = pool.submit(receive)
        group = host.join(world_size=2, timeout_s=TIMEOUT_S)
        send_weights([("w", torch.arange(5))], group, version=1)
    assert received.result() == [("w", [0, 1, 2, 3, 4])]
    with pytest.raises(ConfigError, match="one for each group"):
        host.join(world_size=2, backend="gloo", timeout_s=1)
    group.close()


def test_members_that_never_join_are_named() -> None:
    host = WeightGroupHost()
    with pytest.raises(WeightSyncError, match=r"ranks \[1, 2\] of 3 have not joined .* 1 s"):
        host.join(world_size=3, timeout_s=1)


def test_a_join_without_a_trainer_times_out() -> None:
    port = free_port()
    with pytest.raises(
        WeightSyncError, match=r"rank 1 found no rank 0 on 127.0.0.1:\d+ within 1 s"
    ):
        join_weight_group("127.0.0.1", port, rank=1, world_size=2, timeout_s=1)


def test_an_error_of_the_trainer_reaches_its_readers(members: Any) -> None:
    group, (reader,) = members(_take)

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(3 * BUCKET)
        raise ZeroDivisionError("no such weight")

    with pytest.raises(ZeroDivisionError):
        send_weights(torn(), group, version=3, bucket_bytes=BUCKET)
    assert "ZeroDivisionError('no such weight')" in str(reader.answer())


def test_tensors_may_share_one_memory_and_are_freed_at_once(members: Any) -> None:
    group, (reader,) = members(_take_all)
    made: list[weakref.ref[torch.Tensor]] = []
    memory = torch.zeros(BUCKET // 8)

    def in_one_memory() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            assert not any(each() is not None for each in made[:-1])
            tensor = memory.fill_(number).view(-1)
            made.append(weakref.ref(tensor))
            yield f"w{number}", tensor

    for version in (3, 4):
        made.clear()
        send_weights(in_one_memory(), group, version=version, bucket_bytes=BUCKET)
    for _, taken in reader.answer():
        assert [(tensor == float(name[1])).all() for name, tensor in taken] == [True] * 8


def _leave(group: WeightGroup) -> None:
    with suppress(WeightSyncError), receive_weights(group):
        group.close()


def test_the_trainers_own_error_is_raised_although_its_readers_are_gone(members: Any) -> None:
    group, (reader,) = members(_leave, timeout_s=SHORT_S)

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(3)
        assert reader.answer() is None
        raise ZeroDivisionError("no such weight")

    with pytest.raises(ZeroDivisionError):
        send_weights(torn(), group, version=3, bucket_bytes=BUCKET)
    assert group.broken


def _stop_early(group: WeightGroup) -> Any:
    with receive_weights(group) as (_, tensors):
        next(tensors)


def _refuse(group: WeightGroup) -> Any:
    with receive_weights(group):
        pass


@pytest.mark.parametrize("program", [_stop_early, _refuse])
def test_a_reader_that_does_not_take_all_tensors_fails_the_broadcast(
    members: Any, program: Program
) -> None:
    group, (reader,) = members(program)
    why = "it did not take all tensors of version 3"
    sent = [("w", torch.zeros(3)), *((f"w{n}", torch.zeros(1 << 20)) for n in range(20))]
    with pytest.raises(WeightSyncError, match=f"rank 1 gave up: {why}"):
        send_weights(sent, group, version=3, bucket_bytes=BUCKET)
    assert why in str(reader.answer())


class _SlowStore:
    """A store over a slow network."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def compare_set(self, *arguments: str) -> bytes:
        time.sleep(0.5)
        return self._store.compare_set(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _take_slowly(group: WeightGroup) -> Any:
    group._store = _SlowStore(group._store)
    return _take(group)


def test_the_reason_of_a_trainer_that_ends_at_once_reaches_a_slow_reader(members: Any) -> None:
    group, (reader,) = members(_take_slowly)
    with pytest.raises(TypeError):
        send_weights([], group, version="3")  # type: ignore[arg-type]
    group.close()
    assert "the trainer gave up after 0 tensors of version 3" in str(reader.answer())


def test_a_member_without_a_gpu_refuses_a_group_over_nccl_and_says_so_to_the_others() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store.set("backend", "nccl")  # what a rank 0 with a GPU writes
    store.set("joined/0", "host a, pid 1")
    with pytest.raises(ConfigError, match='this process has none; pass backend="gloo"'):
        join_weight_group("127.0.0.1", store.port, rank=1, world_size=2, timeout_s=TIMEOUT_S)
    assert "needs a GPU in each member" in store.get("failed").decode()
    with pytest.raises(ConfigError, match="this process has none"):
        WeightGroupHost(address="127.0.0.1").join(world_size=2, backend="nccl", timeout_s=1)


def _give_up_in_words(group: WeightGroup) -> None:
    """As over NCCL: the connections stay, and the word in the store is all that tells."""
    group._store.set("failed", "rank 1 gave up: its disk is full")
    group._store.wait(["header/2"])


def test_a_failed_member_is_noticed_through_the_store(members: Any) -> None:
    group, (reader,) = members(_give_up_in_words)
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 .*: rank 1 gave up: its disk"):
        send_weights([("w", torch.zeros(3))], group, version=3)
    assert reader.answer() is None


def _gone_once_connected(port: int) -> None:
    limit = timedelta(seconds=SHORT_S)
    store = dist.TCPStore("127.0.0.1", port, 2, False, timeout=limit, wait_for_workers=False)
    store.set("joined/1", "host a, pid 1")
    _create_backend("gloo", dist.PrefixStore("gloo", store), 1, 2, limit)


def test_a_member_that_dies_before_all_are_connected_fails_the_join() -> None:
    host = WeightGroupHost(address="127.0.0.1")
    with ThreadPoolExecutor() as pool:
        pool.submit(_gone_once_connected, host.port)
        with pytest.raises(WeightSyncError, match="rank 0 gave up"):
            host.join(world_size=2, timeout_s=SHORT_S)


def test_arguments_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        join_weight_group("127.0.0.1", 1, rank=2, world_size=2, timeout_s=1)
    with pytest.raises(ConfigError, match=r"rank 0 .* WeightGroupHost"):
        join_weight_group("127.0.0.1", 1, rank=0, world_size=2, timeout_s=1)
    with pytest.raises(ConfigError, match="a str is no weight group"):
        send_weights([], "group", version=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no backend 'mpi'"):
        WeightGroupHost().join(world_size=2, backend="mpi", timeout_s=1)
