"""The back end ``trinity_sync`` of vLLM's weight transfer, in each worker of an engine.

An update opens one version, which the trainer cannot overwrite until it is loaded, and compares it
with the model; only then is the model changed. All workers load the same version, or none of them.
Tensors are read where they are: in the trainer's shared memory on its node, elsewhere in the files
of the commit. Where one trainer rank holds a whole tensor, a tensor-parallel worker reads its own
part only.

After an error during the load itself, the model has parts of two versions. The worker then ends:
vLLM stops the engine, instead of serving it.
"""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trinity_sync.errors import TrinitySyncError, WeightSyncError
from trinity_sync.integrations.vllm.model_fit import (
    Named,
    Outline,
    quiet_loaders,
    require_fit,
    require_whole,
)
from trinity_sync.integrations.vllm.pinned_version import (
    Wanted,
    end_claim,
    pin_version,
    require_free,
    select_version,
)
from trinity_sync.weights.reader import WeightReader, make_reader_name
from trinity_sync.weights.versions import Version

logger = logging.getLogger(__name__)

OPEN_S = 5.0
"""Seconds in which a version that was found has to be opened: the engine does not generate."""

T = TypeVar("T")


@dataclass
class TrinitySyncInitInfo(WeightTransferInitInfo):
    """What ``/init_weight_transfer_engine`` takes."""

    root: str = ""
    """The job's root, as the workers see it."""
    role: str = "actor"
    """Role of the weights."""
    verify: bool = False
    """Compare the digests of files that are read from a commit."""
    compare: bool = True
    """Compare the tensors with the model before they are loaded."""
    claim: dict[str, Any] = field(default_factory=dict)
    """The updater that calls next; others are refused until the update ends, see `make_claim`."""


@dataclass
class TrinitySyncUpdateInfo(Wanted, WeightTransferUpdateInfo):
    """What ``/update_weights`` takes; while it waits for a version, nothing is generated."""


class TrinitySyncEngine(WeightTransferEngine):
    """Loads versions of a job's weights into one worker's model; see vLLM's base class."""

    init_info_cls = TrinitySyncInitInfo
    update_info_cls = TrinitySyncUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._info: TrinitySyncInitInfo | None = None
        self._claim: dict[str, Any] = {}
        self._reader: WeightReader | None = None
        self._fitting: tuple[torch.nn.Module, list[Outline]] | None = None
        """The model and the tensors that were compared last, and fit in this worker."""
        self._taken: dict[str, int] = {}
        """The elements of them that this worker takes."""

    def init_transfer_engine(self, init_info: TrinitySyncInitInfo) -> None:
        """Open the job; the same call again does nothing.

        Raises:
            ValueError: the job's root is missing.
            WeightSyncError: another updater is in an update, or follows another job. Only the last
                worker raises it, as in `receive_weights`.
        """
        held = self._claim
        _, problem = _do_on_first(lambda: require_free(held, init_info.claim))
        if problem:
            self._raise_in_last(problem)
            return
        self._claim, init_info = init_info.claim, replace(init_info, claim={})
        if init_info == self._info:
            return
        if not init_info.root:
            raise ValueError('init_info needs "root", the folder of the job')
        self.shutdown()
        self._reader = WeightReader(
            root=init_info.root,
            role=init_info.role,
            name=make_reader_name("vllm"),
            verify=init_info.verify,
            timeout_s=OPEN_S,
        )
        self._info = init_info

    def start_weight_update(self) -> None:
        """Do nothing: the model is not touched before the version is open, and fits."""

    def finish_weight_update(self) -> None:
        """Let other updaters of the job update; the update has ended the layerwise reload."""
        self._claim = end_claim(self._claim)

    def receive_weights(self, update_info: TrinitySyncUpdateInfo) -> None:
        """Load a version into the model.

        Raises:
            WeightSyncError: no such version could be opened in time, or it does not fit the model,
                here or in another worker: no worker has loaded anything. Only the last worker
                raises it: vLLM reads the answers in order, up to the first error, and would take
                those behind it for the answers to the next call. ``finish_weight_update`` then ends
                the update in the others.
        """
        try:
            with ExitStack() as opened:
                tensors, problem = self._open(update_info, opened)
                if tensors is not None:
                    self._load(tensors)
                else:
                    self._raise_in_last(problem)
        except BaseException:
            # vLLM ends the update of a worker that raises, without a call
            self._claim = end_claim(self._claim)
            raise

    def _raise_in_last(self, problem: str) -> None:
        if (1 + get_world_group().rank) % self.parallel_config.world_size == 0:
            raise WeightSyncError(problem)

    def shutdown(self) -> None:
        """Close the reader."""
        if self._reader:
            self._reader.close()
        self._info = self._reader = None

    def _open(
        self, wanted: TrinitySyncUpdateInfo, opened: ExitStack
    ) -> tuple[Iterable[Named] | None, str]:
        """Open the same version in all workers, once it fits all of their models.

        Return its tensors, which are valid until ``opened`` is closed; or None in all workers, and
        the problem.
        """
        if not ((reader := self._reader) and (info := self._info)):
            return None, (
                "the engine knows no job yet; call init_weight_transfer_engine first, also after "
                "each start of the engine"
            )
        version, problem = _do_on_first(
            lambda: select_version(reader, info.root, info.role, wanted)
        )
        if version is None:
            return None, problem
        tensors, problem = _attempt(lambda: self._pin(reader, version, opened))
        answers = _gather((problem, self._taken))
        problem = next((each for each, _ in answers if each), "")
        if not problem and self._fitting:
            outlines, taken = self._fitting[1], [each for _, each in answers]
            _, problem = _attempt(lambda: require_whole(outlines, taken))
        return (None, problem) if problem else (tensors, "")

    def _pin(self, reader: WeightReader, version: Version, opened: ExitStack) -> Iterable[Named]:
        view = opened.enter_context(pin_version(reader, version))
        self._require_fit(view.list_outlines())
        source = view.version.source
        logger.info("loading version %d (run %d) from %s", version.step, version.run, source)
        return view.iter_views()

    def _require_fit(self, outlines: list[Outline]) -> None:
        """Raise an error unless the tensors fill the model; compares the same ones only once."""
        if self._info and not self._info.compare:
            return
        if self._fitting is None or self._fitting != (self.model, outlines):
            self._fitting, self._taken = None, {}
            try:
                self._taken = require_fit(self.model, self.model_config, outlines)
            except WeightSyncError:
                raise
            except BaseException:
                _end_worker("the model could not be restored after the comparison")
            self._fitting = self.model, outlines

    def _load(self, tensors: Iterable[Named]) -> None:
        try:
            with quiet_loaders():
                initialize_layerwise_reload(self.model)
                self.model.load_weights(tensors)
                finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            _end_worker("the model has parts of two versions")


def _end_worker(why: str) -> NoReturn:
    """End this process, so that vLLM stops the engine; an exception would leave it serving."""
    logger.critical("%s: this worker ends", why, exc_info=True)
    logging.shutdown()
    os._exit(os.EX_SOFTWARE)


def _do_on_first(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return, in all workers, what the action returned in the first one, or its error."""
    group = get_world_group()
    answer = _attempt(action) if group.rank_in_group == 0 else None
    return group.broadcast_object(answer, src=0)


def _gather(answer: T) -> list[T]:
    """Return the answers of all workers."""
    group = get_world_group()
    if group.world_size == 1:
        return [answer]
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, answer, group=group.cpu_group)
    return answers


def _attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of the action, or None and the message of its error."""
    try:
        return action(), ""
    except TrinitySyncError as error:
        return None, str(error)
    except Exception as error:  # the other workers wait for this one
        logger.exception("this worker cannot load the weights")
        return None, repr(error)
