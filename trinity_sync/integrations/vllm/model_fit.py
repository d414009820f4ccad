"""Whether the tensors of a version fill a vLLM model: each parameter, and nothing else.

vLLM's ``load_weights`` leaves the memory of a parameter that no tensor was sent for undefined, and
takes a part of a tensor that is too large. So the model's own loaders are run first, on parameters
without memory and tensors without content, and what they would copy is counted. vLLM's layerwise
reload provides such parameters, and puts the real ones back.

Counts, not names, are compared: only the model knows which tensors its fused parameters consist of,
and which part of them this worker holds.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from trinity_sync.errors import WeightSyncError
from trinity_sync.tensors.torch_private import TorchDispatchMode

logger = logging.getLogger(__name__)

OPTIONAL = ("scale", "scale_inv", "zero_point", "scales", "scale_2")
"""Ends of the names of parameters that a quantized layer computes if no tensor was sent."""
SHOWN = 5
"""Problems that a message names."""

Named = tuple[str, torch.Tensor]
Outline = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


@dataclass
class _Counts:
    """Elements that loaders would copy."""

    needed: dict[str, int] = field(default_factory=dict)
    """Parameter -> its elements."""
    into: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Parameter -> elements that are copied into it."""
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Parameter -> the tensors that they come from."""
    taken: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Tensor -> elements of it that are copied."""
    current: str = ""
    """The tensor that the model was given last."""


def require_fit(model: Any, model_config: Any, tensors: Sequence[Outline]) -> dict[str, int]:
    """Raise an error unless the tensors fill the model of this worker, which is not changed.

    ``tensors`` have the full shapes, in the order in which they will be loaded. Return the number
    of elements that this worker takes of each, for `require_whole`; tensors without any are left
    out.

    Raises:
        WeightSyncError: a tensor is unknown, or of another shape than the model's, or parameters
            would not be filled; it names them.
        Exception: vLLM could not restore the model, which is not usable any longer.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    counts = _Counts()
    tied = _find_tied(model)
    loaders: list[tuple[Any, Any]] = []
    try:
        with quiet_loaders():
            initialize_layerwise_reload(model)
            _count_loads(model, counts, loaders)
            model.load_weights(_iter_empty(tensors, counts))
    except NotImplementedError as error:  # a loader looks at values
        logger.warning("the weights are not compared with the model before they load: %s", error)
        return {}
    except Exception as error:  # whatever the loaders of that model raise
        shape = next((list(shape) for name, shape, _ in tensors if name == counts.current), [])
        raise WeightSyncError(
            f"{counts.current} of shape {shape} does not fit the model: {error or repr(error)}. "
            "Nothing was loaded; train and serve the same model"
        ) from error
    finally:
        for tensor, loader in loaders:
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        with quiet_loaders():
            finalize_layerwise_reload(model, model_config)
    problems = []
    for name, numel in counts.needed.items():
        found = max(counts.into[each] for each in tied.get(name, [name]))
        if found < numel:
            given = ", ".join(counts.sources[name])
            problems.append(
                f"{name} would get {found:,} of its {numel:,} elements"
                + (f", from {given}" if given else "")
            )
    if problems:
        raise _describe(problems)
    return {name: numel for name, numel in counts.taken.items() if numel}


def require_whole(tensors: Sequence[Outline], taken: Sequence[dict[str, int]]) -> None:
    """Raise an error if a tensor has elements that no worker takes: it is larger than the model's.

    ``taken`` is what `require_fit` returned in each worker.

    Raises:
        WeightSyncError: there are such tensors; it names them.
    """
    problems = []
    for name, shape, _ in tensors:
        total = sum(each.get(name, 0) for each in taken)
        if 0 < total < torch.Size(shape).numel():
            problems.append(f"{name} of shape {list(shape)} is larger than in the model")
    if problems:
        raise _describe(problems)


def _describe(problems: Sequence[str]) -> WeightSyncError:
    more = f" and {len(problems) - SHOWN} more" if problems[SHOWN:] else ""
    return WeightSyncError(
        f"the weights do not fit the model: {'; '.join(problems[:SHOWN])}{more}. Nothing was "
        "loaded; train and serve the same model"
    )


@contextmanager
def quiet_loaders() -> Iterator[None]:
    """Keep vLLM from a warning for each tensor that it rounds, at each update."""
    loaders = logging.getLogger("vllm.model_executor")
    before = loaders.level
    loaders.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loaders.setLevel(before)


def _find_tied(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return, for each parameter, the names of all parameters that share its memory."""
    at: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.data_ptr():  # repacked weights are elsewhere
            at[parameter.data_ptr()].append(name)
    return {name: names for names in at.values() for name in names}


def _count_loads(model: torch.nn.Module, counts: _Counts, before: list[tuple[Any, Any]]) -> None:
    """Make the loader of each tensor count; add the tensors and their own loaders to ``before``."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for key, tensor in [*parameters.items(), *buffers.items()]:
            loader: Any = getattr(tensor, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":  # of the reload
                loader = loader.__wrapped__
            if key in parameters and not _is_optional(module, key):
                needed = getattr(tensor, "weight_loader_numel", tensor.numel())
                counts.needed[prefix + key] = needed
            before.append((tensor, loader))
            counting = _counting(loader or default_weight_loader, prefix + key, counts)
            tensor.weight_loader = counting


def _is_optional(module: torch.nn.Module, key: str) -> bool:
    """Return whether a quantized layer computes a parameter for which no tensor is sent."""
    method = type(getattr(module, "quant_method", None)).__name__
    quantized = method != "NoneType" and not method.startswith("Unquantized")
    return quantized and key.endswith(OPTIONAL)


def _counting(loader: Callable[..., Any], name: str, counts: _Counts) -> Callable[..., Any]:
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    @wraps(loader)
    def count(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _CopyCounter() as copies:  # the layerwise reload leaves biases in memory
            result = loader(param if param.is_meta else to_meta_tensor(param), *args, **kwargs)
        counts.into[name] += copies.copied + copies.filled
        counts.sources[name].append(counts.current)
        counts.taken[counts.current] += copies.copied
        return result

    return count


class _CopyCounter(TorchDispatchMode):
    """Counts elements that are copied, and those that are filled, such as padding."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.filled = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel()
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.filled += args[0].numel()
        return func(*args, **(kwargs or {}))


def _iter_empty(tensors: Sequence[Outline], counts: _Counts) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape, dtype in tensors:
        counts.current = name
        # pages are taken once they are touched
        yield name, torch.empty(shape, dtype=dtype, device="cpu")
