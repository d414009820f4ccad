"""A pytest plugin: PyTorch's tests of DCP save with `DcpSaver` and load with `StepReader`.

What they write to and read from, ``FileSystemWriter``, ``FileSystemReader`` and the folders that
they pass as ``checkpoint_id``, become a job whose root is that folder. Each save is its next step,
by ``async_save`` with a `StepWriter` as writer and stager, on the stack that the environment names.
A blocking ``save`` waits for the future. A load reads the newest committed step.

Ranks are forked, because a spawned process would know nothing of this plugin. On a machine without
GPUs, what the tests put on one is on the CPU, and tests that want several GPUs run on gloo ranks.
"""

import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, format_utils, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._tensor import common_dtensor

from tests.environments.pytorch.suite import Report
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.integrations.dcp import DcpSaver, StepReader, StepWriter
from trinity_sync.storage.discovery import find_newest

_saved_with: dict[Path, tuple[DcpSaver, Iterator[int]]] = {}
"""This process's saver of a folder, and the numbers of its next steps."""
_save, _async_save = state_dict_saver.save, state_dict_saver.async_save


class Writer:
    """In the place of ``FileSystemWriter``: a folder."""

    def __init__(self, path: Any, *_: Any, **options: Any) -> None:
        self.path = _move_below_tmp(path)


class Reader(StepReader):
    """In the place of ``FileSystemReader``: the newest step of a folder."""

    def __init__(self, path: Any, *_: Any, **options: Any) -> None:
        self._folder = _move_below_tmp(path)
        newest = find_newest(self._folder)
        super().__init__(self._folder, newest.step if newest else 0)

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(
            None if checkpoint_id and Path(checkpoint_id) == self._folder else checkpoint_id
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return "://" not in str(checkpoint_id)


def _move_below_tmp(path: Any) -> Path:
    """Return a folder that the runner removes, also for a name that a test has chosen."""
    own = Path(tempfile.gettempdir())
    return Path(path) if Path(path).is_relative_to(own) else own / Path(path).name


def async_save(
    state_dict: Any,
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    async_stager: Any = None,
    **others: Any,
) -> Any:
    place = storage_writer or Writer(checkpoint_id)
    saver, steps = _open(place.path)
    saver.make_planner = (lambda: planner) if planner else DefaultSavePlanner
    writer = saver.writer(next(steps))
    return _async_save(
        state_dict, storage_writer=writer, planner=planner, async_stager=writer, **others
    )


def save(state_dict: Any, storage_writer: Any = None, **others: Any) -> Any:
    if isinstance(storage_writer, StepWriter):  # in the thread of `async_save`
        return _save(state_dict, storage_writer=storage_writer, **others)
    return async_save(state_dict, storage_writer=storage_writer, **others).result()


def save_state_dict(state_dict: Any, storage_writer: Any, **others: Any) -> Any:
    return save(state_dict, storage_writer=storage_writer, **others)


def _open(folder: Path) -> tuple[DcpSaver, Iterator[int]]:
    if folder not in _saved_with:
        group = dist.is_initialized()
        create = CheckpointCoordinator.of_process_group if group else CheckpointCoordinator
        _saved_with[folder] = DcpSaver(create(folder)), itertools.count(1)
        Finalize(None, pytest_runtest_teardown, exitpriority=10)  # of a rank
    return _saved_with[folder]


def pytest_runtest_teardown() -> None:
    """Leave no thread to a process that forks the next test's ranks."""
    for saver, _ in _saved_with.values():
        saver.saves.close(timeout=0)
    _saved_with.clear()


def _start_by_fork(self: Any) -> None:
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _run_anyway(*_: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _move_to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *where: Any, **others: Any) -> Any:
        return move(self, *("cpu" if type(each) is int else each for each in where), **others)

    return to


def _stay(self: Any, *_: Any) -> Any:
    return self


def _use_gloo(init: Callable[..., Any]) -> Callable[..., Any]:
    def init_pg(self: Any, eager_init: Any, backend: Any = None) -> None:
        init(self, eager_init, backend or self.backend.replace("cpu:gloo,cpu:gloo", "gloo"))

    return init_pg


def _use_cpu(init: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *positional, **others: init(
        self, *positional, **{"device_id": torch.device("cpu"), **others}
    )


def _run_without_gpus() -> None:
    common_distributed.skip_if_lt_x_gpu = common_dtensor.skip_if_lt_x_gpu = _run_anyway
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to, kind.cuda = _move_to_cpu(kind.to), _stay
    base, wrapped = common_dtensor.DTensorTestBase, FullyShardedDataParallel
    base.init_pg, wrapped.__init__ = _use_gloo(base.init_pg), _use_cpu(wrapped.__init__)
    torch.accelerator.current_device_index = lambda: "cpu"


multiprocessing.set_start_method("fork")
common_distributed.MultiProcessTestCase._spawn_processes = _start_by_fork
for module in (dcp, state_dict_saver):
    module.save, module.async_save, module.save_state_dict = save, async_save, save_state_dict
for module in (dcp, _storage_utils, format_utils):
    module.FileSystemWriter, module.FileSystemReader = Writer, Reader
format_utils._save_state_dict = save_state_dict
if not torch.accelerator.is_available():
    _run_without_gpus()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report())
