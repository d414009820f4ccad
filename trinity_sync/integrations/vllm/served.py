"""Whether a vLLM model computes with the values of the version that was loaded into it.

A second run of the loaders would repeat their errors, and sums of the values are blind to two
projections exchanged. Parameters do not tell it either: kernels repack them, and may compute with a
copy that an update did not reach. So each layer is asked: rows of the identity, through the layer's
own kernel, give columns of the matrix that it multiplies with, to the bit. What they have to be is
copied from the version before it is loaded, found by the names and sizes that the model declares,
not by its loaders. Routed experts are asked for outputs, compared within a tolerance.

A sample is other columns at each update, with all of their rows. Quantized layers, and values that
loaders compute or put into another order, are not comparable.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from trinity_sync.errors import WeightSyncError
from trinity_sync.integrations.vllm.model_fit import SHOWN, Named, Outline

logger = logging.getLogger(__name__)

SAMPLE = 8
"""Adjacent columns that are a sample of a matrix: a cache line of each row, or less."""
BLOCK = 1024
"""Columns to ask for at a time if all are compared."""
STACKED = ("qkv_proj", "gate_up_proj")
"""Projections that are one after the other in a trainer's fused matrix; others may be mixed."""
TOLERANCE = 0.03
"""Of the norm of an expert's outputs: kernels round between its two products."""
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass
class _Part:
    """What a layer of this worker holds of a tensor of the version."""

    tensor: str
    index: tuple[Any, ...]
    values: torch.Tensor | None = None


@dataclass
class _Probe:
    """A question to a layer, and the parts that tell the answer; none if it is not comparable."""

    parameter: str
    parts: list[_Part]
    compare: Callable[[list[torch.Tensor]], list[str] | None]
    """Returns what is wrong in each part, or nothing; None if the parts do not tell it."""


class ServedValues:
    """What a model has to compute with, once the tensors of ``outlines`` are loaded.

    With ``every``, all values are compared, for which this worker's part of them is copied.
    """

    def __init__(self, model: Any, outlines: Sequence[Outline], *, every: bool) -> None:
        self._every = every
        self._shapes = {name: shape for name, shape, _ in outlines}
        self._names = _map_names(model, self._shapes)
        self._packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._first_names: dict[int, str] = {}
        """Those of parameters that are tied, by their identity."""
        modules = [
            (name.replace(".base_layer", ""), module)  # inside the layers of adapters
            for name, module in model.named_modules(remove_duplicate=False)
        ]
        self._has_transposed = any(  # as in GPT-2
            self._shapes.get(self._names.get(f"{name}.weight", ""))
            == (module.input_size, module.output_size)
            != (module.output_size, module.input_size)
            for name, module in modules
            if isinstance(module, LinearBase)
        )
        self._has_head = any(isinstance(module, ParallelLMHead) for _, module in modules)
        self._probes = [probe for each in modules for probe in self._plan(*each)]
        self.incomparable: set[str] = set()
        """The parameters that could not be compared."""

    def sample(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield the tensors, after copying what will be compared of them."""
        wanted: dict[str, list[_Part]] = {}
        for part in (part for probe in self._probes for part in probe.parts):
            wanted.setdefault(part.tensor, []).append(part)
        for name, tensor in tensors:
            for part in wanted.get(name, []):
                part.values = tensor[part.index].clone()
            yield name, tensor

    @torch.inference_mode()
    def compare(self) -> None:
        """Compare the model with what was sampled.

        Raises:
            WeightSyncError: it computes with other values; names its parameters and the tensors.
        """
        problems: dict[str, str] = {}
        for probe in self._probes:
            values = [part.values for part in probe.parts if part.values is not None]
            try:
                found = probe.compare(values) if values else None
            except Exception as error:  # whatever a kernel raises that takes no such input
                logger.debug("%s cannot be asked", probe.parameter, exc_info=error)
                found = None
            if found is None:
                self.incomparable.add(probe.parameter)
            for problem, part in zip(found or [], probe.parts, strict=False):
                if problem:
                    problems.setdefault(f"{probe.parameter} does not have {part.tensor}", problem)
        names = ", ".join(sorted(self.incomparable)) or "none"
        logger.info("asked layers %d times; not comparable: %s", len(self._probes), names)
        if problems:
            texts = [f"{which}: {problem}" for which, problem in problems.items()]
            more = f"; and {len(texts) - SHOWN} more" if texts[SHOWN:] else ""
            raise WeightSyncError(
                f"the engine does not serve what was trained: {'; '.join(texts[:SHOWN])}{more}. "
                "Discard its answers since this update, and start it with a vLLM and options that "
                "load this model"
            )

    def _plan(self, name: str, module: Any) -> Iterator[_Probe]:
        """Yield the probes of a module's own parameters."""
        if isinstance(module, RoutedExperts):
            yield from self._plan_experts(name.removesuffix(".routed_experts"), module)
            return
        method = getattr(module, "quant_method", None)
        is_plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
        is_layer = isinstance(module, LinearBase | VocabParallelEmbedding)
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{key}".lstrip(".")
            first = self._first_names.setdefault(id(parameter), full)
            parts: list[_Part] = []
            if is_plain or not is_layer:
                parts = self._find_parts(full, module, parameter)
                parts = parts or self._find_parts(first, module, parameter)
            compare = partial(_compare, getattr(module, "params_dtype", parameter.dtype))
            if not (parts and is_layer and key == "weight"):
                yield _Probe(full, parts, partial(compare, parameter.detach))
                continue
            rows, columns = parts[0].index
            is_embedding = not isinstance(module, LinearBase | ParallelLMHead)
            if is_embedding:
                for few, start in self._choose(rows):
                    read = partial(_embed, module, start, few.stop - few.start)
                    part = _Part(parts[0].tensor, (few, columns))
                    yield _Probe(full, [part], partial(compare, read))
            for few, start in [] if is_embedding and self._has_head else self._choose(columns):
                size = few.stop - few.start, columns.stop - columns.start
                taken = [_Part(each.tensor, (each.index[0], few)) for each in parts]
                yield _Probe(full, taken, partial(compare, partial(_multiply, module, size, start)))

    def _find_parts(self, name: str, module: Any, parameter: torch.Tensor) -> list[_Part]:
        """Return what this worker holds of the tensors in a parameter; nothing if it is unknown."""
        path, _, key = name.rpartition(".")
        prefix, dot, last = path.rpartition(".")
        names = [f"{prefix}{dot}{each}.{key}" for each in self._packed.get(last, [])]
        if not names or not self._names.keys() >= set(names):
            names = [name]
        tensors = [self._names[each] for each in names if each in self._names]
        heights = [next(iter(self._shapes[each]), 0) for each in tensors]
        is_vocabulary = isinstance(module, VocabParallelEmbedding)
        if is_vocabulary or isinstance(module, LinearBase):
            rank, world, sizes = module.tp_rank, module.tp_size, module.output_partition_sizes
            width = getattr(module, "input_size_per_partition", module.input_size)
            inner = [width] if key == "weight" else []
        else:
            rank, world = get_tp_group().rank_in_group, get_tp_group().world_size
            sizes, inner = list(parameter.shape[:1]), list(parameter.shape[1:])
        offsets = [0] * len(sizes)
        if last in STACKED and heights == [sum(sizes) * world]:  # fused in the version as well
            tensors, heights = tensors * len(sizes), [size * world for size in sizes]
            offsets = [sum(heights[:number]) for number in range(len(sizes))]
        is_turned = self._has_transposed and isinstance(module, LinearBase) and inner
        if len(tensors) != len(sizes) or 0 in sizes or is_turned:
            return []
        parts = []
        for tensor, offset, height, size in zip(tensors, offsets, heights, sizes, strict=True):
            shape = list(self._shapes[tensor])[1:]
            start = rank * size if is_vocabulary else rank * height // world // size * size
            stop = min(start + size, height)  # the vocabulary is padded
            begin = rank if shape != inner else 0
            is_known = shape in (inner, [each * world for each in inner])
            if not is_known or start >= stop or (height % size and not is_vocabulary):
                return []
            columns = (slice(begin * each, (begin + 1) * each) for each in inner)
            parts.append(_Part(tensor, (slice(offset + start, offset + stop), *columns)))
        return parts

    def _choose(self, whole: slice) -> Iterator[tuple[slice, int]]:
        """Yield the parts of a slice to compare, and where they begin in it."""
        size = whole.stop - whole.start
        count = min(BLOCK if self._every else SAMPLE, size)
        for start in range(0, size, count) if self._every else [random.randint(0, size - count)]:
            yield slice(whole.start + start, min(whole.start + start + count, whole.stop)), start

    def _plan_experts(self, name: str, layer: Any) -> Iterator[_Probe]:
        config, total = layer.moe_config, layer.global_num_experts
        parallel = config.moe_parallel_config
        size, half = config.intermediate_size // parallel.tp_size, config.intermediate_size
        first = parallel.tp_rank * size
        gate, up = (slice(at, at + size) for at in (first, first + half))
        own = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        for expert in range(total) if self._every else [random.randrange(total)]:
            start = random.randint(0, layer.hidden_size - SAMPLE)
            few = slice(start, start + SAMPLE)
            names = [f"{name}.{expert}.{each}.weight" for each in own]
            indices: list[tuple[Any, ...]] = [(gate, few), (gate, few), (few, gate)]
            if names[0] not in self._names and not layer.is_fused_checkpoint_transposed:
                names = [f"{name}.{each}_proj" for each in ("gate_up", "gate_up", "down")]
                indices = [(expert, gate, few), (expert, up, few), (expert, few, gate)]
            tensors = [self._names[each] for each in names if each in self._names]
            parts = [_Part(*each) for each in zip(tensors, indices, strict=False)]
            is_known = _can_ask_experts(layer) and len(parts) == len(names)
            compare = partial(_compare_expert, layer, expert, start)
            yield _Probe(name, parts if is_known else [], compare)


def _map_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the tensors by their names in the model, fused ones apart."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = replace(mapper, orig_to_new_stacked={})
    found = {name: mapper.map_name(name) if mapper else name for name in names}
    return {  # what gets another name, such as A_log, gets other values as well
        mapped: name
        for name, mapped in found.items()
        if mapped and mapped.rpartition(".")[2] == name.rpartition(".")[2]
    }


def _multiply(layer: Any, size: tuple[int, int], start: int) -> torch.Tensor:
    """Return columns of the matrix that a layer multiplies with, from ``start`` on."""
    rows = torch.zeros(size, dtype=layer.params_dtype, device=layer.weight.device)
    rows.diagonal(start).fill_(1)
    product: torch.Tensor = layer.quant_method.apply(layer, rows, None).t()
    return product


def _embed(layer: Any, start: int, count: int) -> torch.Tensor:
    ids = torch.arange(start, start + count, device=layer.weight.device)
    rows: torch.Tensor = layer.quant_method.embedding(layer, ids)
    return rows


def _compare(
    dtype: torch.dtype, read: Callable[[], torch.Tensor], parts: list[torch.Tensor]
) -> list[str] | None:
    served, problems, is_reordered = read().to(dtype), [], False
    rounds = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    for each in parts:
        part, served = served[: len(each)], served[len(each) :]
        expected = each.to(part.device, dtype)
        wrong = ~torch.isclose(part, expected, 2e-3 if rounds else 0.0, 1e-37, equal_nan=True)
        if wrong.any() and each.ndim == 2 and torch.equal(part.sort(0)[0], expected.sort(0)[0]):
            wrong, is_reordered = torch.zeros_like(wrong), True
        problems.append(
            f"{int(wrong.sum()):,} of {wrong.numel():,} compared values differ, the first is "
            f"{part[wrong][0]:.6g} instead of {expected[wrong][0]:.6g}"
            if wrong.any()
            else ""
        )
    return None if is_reordered and not any(problems) else problems


def _can_ask_experts(layer: Any) -> bool:
    method, config = layer.quant_method, layer.moe_config
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and not method.is_monolithic
        and layer.activation.value in _ACTIVATIONS
        and layer.swiglu_limit is None
        and not (config.has_bias or config.tp_shard_with_padding)
        and not (config.moe_parallel_config.use_ep or config.moe_parallel_config.dp_size > 1)
    )


def _compare_expert(
    layer: Any, expert: int, start: int, parts: list[torch.Tensor]
) -> list[str] | None:
    """Ask an expert with inputs so large that its activation is far from linear."""
    device, dtype = layer.w13_weight.device, layer.params_dtype
    gate, up, down = (each.to(device, dtype).float() for each in parts)
    scale = 2.0 ** round(math.log2(4 / float(gate.square().mean().sqrt())))
    rows = torch.zeros(SAMPLE, layer.hidden_size, dtype=dtype, device=device)
    rows.diagonal(start).fill_(scale)
    ids = layer.quant_method.topk_indices_dtype or torch.int32
    chosen = torch.full((SAMPLE, 1), expert, dtype=ids, device=device)
    weights = torch.ones(SAMPLE, 1, device=device)
    outputs = layer.quant_method.apply(layer, rows, weights, chosen, None, None)
    inner = _ACTIVATIONS[layer.activation.value](gate * scale) * (up * scale)
    expected = (down @ inner).t()
    norm = float(expected.norm())
    if not 0 < norm < math.inf:
        return None
    error = float((outputs[:, start : start + SAMPLE] - expected).norm()) / norm
    # not a number either, if the outputs are not
    return [""] if error <= TOLERANCE else [f"outputs of expert {expert} differ by {error:.0%}"]
