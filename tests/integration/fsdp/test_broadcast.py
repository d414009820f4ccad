"""The whole weights of a sharded model, gathered on two trainer ranks and received by this process.

Trinity's function asks the engine for ``_strategy``, which veRL's engines do not have, and sends 0
of 27 tensors under FSDP2.
"""

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from verl.utils.fsdp_utils import apply_fsdp2

from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import differences
from trinity_sync import WeightSyncError
from trinity_sync.integrations.verl import fsdp_sync_weight_nccl
from trinity_sync.integrations.verl.fsdp.broadcast import iter_full_parameters
from trinity_sync.stack.daemon import free_port
from trinity_sync.weights.broadcast import receive_weights
from trinity_sync.weights.weight_group import WeightGroupHost, join_weight_group

TIMEOUT_S = 180.0
STRATEGIES = ("fsdp1", "fsdp1 with original parameters", "fsdp2")

Received = tuple[int, list[tuple[str, torch.Tensor]]]


def build(folder: Path) -> Any:
    """The model of a folder with its blocks in bf16 and the rest, a buffer with it, in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers.to(torch.bfloat16)
    model.model.register_buffer("offsets", torch.arange(5.0))
    return model


def sharded(folder: Path, strategy: str) -> Any:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = build(folder)
    if strategy == "fsdp2":
        apply_fsdp2(model, {"mesh": mesh, "mp_policy": MixedPrecisionPolicy()}, {})
        return model
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Qwen2DecoderLayer}),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=strategy == "fsdp1 with original parameters",
    )


def host_on_rank_0(port: int) -> Any:
    """The trainer's group on its rank 0."""
    if dist.get_rank():
        return None
    return WeightGroupHost(port, "127.0.0.1").join(world_size=2, timeout_s=TIMEOUT_S)


def train(folder: Path, port: int) -> tuple[str, str]:
    """A trainer rank: each model twice, since the first must leave it as it was, then a failure."""
    group = host_on_rank_0(port)
    for version, strategy in enumerate(STRATEGIES):
        module = sharded(folder, strategy)
        engine = SimpleNamespace(module=module, is_param_offload_enabled=False)
        for _ in range(2):
            fsdp_sync_weight_nccl(engine, group, version=version)
    if group is not None:
        group.close()
    try:
        fsdp_sync_weight_nccl(engine, group, version=7)
    except WeightSyncError as error:
        return "WeightSyncError", str(error)
    return "", "no error"


def received(port: int, times: int) -> list[Received]:
    group = join_weight_group("127.0.0.1", port, rank=1, world_size=2, timeout_s=TIMEOUT_S)
    taken = []
    for _ in range(times):
        with receive_weights(group) as (version, tensors):
            taken.append((version, [(name, tensor.clone()) for name, tensor in tensors]))
    group.close()
    return taken


ROOM = 96 << 20
WITHOUT_ROOM = [(strategy, rank) for strategy in ("fsdp1", "fsdp2") for rank in (0, 1)]


def train_without_room(ports: list[int]) -> list[str]:
    """What this trainer rank hears, where one has less room than the whole of a tensor takes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    heard = []
    for port, (strategy, short) in zip(ports, WITHOUT_ROOM, strict=True):
        model = torch.nn.utils.skip_init(torch.nn.Linear, 1 << 13, 1 << 13, bias=False)
        if strategy == "fsdp1":
            module: Any = FSDP(model, device_id=torch.device("cpu"), device_mesh=mesh)
        else:
            module = fully_shard(model, mesh=mesh)
        group = host_on_rank_0(port)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        if dist.get_rank() == short:
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, limits[1]))
        engine = SimpleNamespace(module=module, is_param_offload_enabled=False)
        try:
            fsdp_sync_weight_nccl(engine, group, version=7)
        except Exception as error:
            heard.append(repr(error))
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return heard


def refusal(port: int) -> str:
    group = join_weight_group("127.0.0.1", port, rank=1, world_size=2, timeout_s=TIMEOUT_S)
    with pytest.raises(WeightSyncError) as heard, receive_weights(group) as (_, tensors):
        list(tensors)
    return str(heard.value)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def tied(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model with its output layer tied to its embedding."""
    config = AutoConfig.from_pretrained(tiny, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def test_every_parameter_of_a_sharded_model_comes_once_and_bit_equal_or_all_ranks_raise(
    tied: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    port = free_port()
    ranks = pool.submit(on_ranks, train, tied, port, scratch=tmp_path)
    taken = received(port, 2 * len(STRATEGIES))
    model = build(tied)
    expected = dict(model.named_parameters()) | {"model.offsets": model.model.offsets}
    assert "lm_head.weight" not in expected
    assert [version for version, _ in taken] == [0, 0, 1, 1, 2, 2]
    for version, tensors in taken:
        assert len(tensors) == len(expected), STRATEGIES[version]
        assert differences(expected, dict(tensors), STRATEGIES[version]) == []
    first, second = ranks.result()
    assert (first[0], second[0]) == ("WeightSyncError", "WeightSyncError")
    assert "trainer rank 1: rank 0 could not send version 7: " in second[1]
    assert "can no longer use this weight group, it was closed" in second[1]


@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_masters_are_sent_after_a_forward_that_left_copies_in_its_own_dtype(
    one_rank: None, reshard_after_forward: bool | None
) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    how: Any = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reshard_after_forward": reshard_after_forward,
    }
    fully_shard(model[0], **how)
    fully_shard(model, **how)
    masters = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    model(torch.ones(1, 4))
    sent = dict(iter_full_parameters(model))
    assert differences(masters, sent) == []  # of torch.float32
    model(torch.ones(1, 4)).sum().backward()


def test_a_rank_without_room_for_a_whole_tensor_leaves_no_other_rank_waiting(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    ports = [free_port() for _ in WITHOUT_ROOM]
    ranks = pool.submit(on_ranks, train_without_room, ports, scratch=tmp_path)
    readers = [refusal(port) for port in ports]
    for (_, short), reader, heard in zip(
        WITHOUT_ROOM, readers, zip(*ranks.result(), strict=True), strict=True
    ):
        assert "Cannot allocate memory" in reader
        assert heard[short].startswith("RuntimeError")
        assert f"trainer rank {short} could not gather the weights: " in heard[1 - short]
