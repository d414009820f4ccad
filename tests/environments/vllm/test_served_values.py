"""What a real vLLM on the CPU computes with after updates, and faults on the way to it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.environments.vllm.engines import publish, randomize, running_engine
from trinity_sync import CheckpointCoordinator, WeightSyncError
from trinity_sync.integrations.vllm import VLLMUpdater

pytestmark = pytest.mark.timeout(600)

UPDATES = 10
SIZES = {
    "vocab_size": 100,  # which vLLM pads
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def make(name: str, **options: Any) -> Any:
    """A tiny model of transformers with random weights."""
    config = getattr(transformers, f"{name}Config")(**options)
    return randomize(transformers.AutoModelForCausalLM.from_config(config).float().eval(), 0)


@contextmanager
def serving(
    folder: Path, root: Path, model: Any, *, values: Any = "sample", **options: Any
) -> Iterator[tuple[Any, Callable[[int], int]]]:
    """Yield an ``LLM`` that was started with a model, and a function that updates it."""
    model.save_pretrained(folder)
    transfer = {"backend": "trinity_sync"}
    with (
        running_engine(folder, weight_transfer_config=transfer, **options) as llm,
        CheckpointCoordinator(root) as saves,
        VLLMUpdater(llm, root, values=values) as updater,
    ):

        def update(step: int) -> int:
            publish(saves, step, randomize(model, step).state_dict())
            return updater.update(min_step=step)

        yield llm, update


def compare_all(worker: Any, state: Path) -> list[str]:
    """Compare all values of a worker's model; return the parameters that are not comparable."""
    from trinity_sync.integrations.vllm.served import ServedValues

    tensors = torch.load(state, mmap=True)
    outlines = [(name, tuple(each.shape), each.dtype) for name, each in tensors.items()]
    served = ServedValues(worker.model_runner.model, outlines, every=True)
    for _ in served.sample(tensors.items()):
        pass
    served.compare()
    return sorted(served.incomparable)


HEALTHY: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama with biases": (
        lambda: make("Llama", **GROUPED, attention_bias=True, mlp_bias=True),
        {},
    ),
    "llama, tied, bfloat16, two workers": (
        lambda: make("Llama", **GROUPED, tie_word_embeddings=True),
        {"dtype": "bfloat16", "tensor_parallel_size": 2},
    ),
    "qwen2, tied": (lambda: make("Qwen2", **GROUPED, tie_word_embeddings=True), {}),
    "qwen2, one key head for two workers": (
        lambda: make("Qwen2", **SIZES, num_key_value_heads=1, tie_word_embeddings=False),
        {"tensor_parallel_size": 2},
    ),
    "qwen3, bfloat16": (
        lambda: make("Qwen3", **GROUPED, head_dim=32, tie_word_embeddings=False),
        {"dtype": "bfloat16"},
    ),
    "gemma": (lambda: make("Gemma", **GROUPED, head_dim=32), {}),
    "gemma3, bfloat16": (
        lambda: make("Gemma3Text", **GROUPED, head_dim=32),
        {"dtype": "bfloat16"},
    ),
    "phi3, whose trainer has fused projections, two workers": (
        lambda: make("Phi3", **GROUPED, pad_token_id=0),
        {"tensor_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_updates_of_common_models_are_compared_whole_and_raise_nothing(
    name: str, root: Path, tmp_path: Path
) -> None:
    build, options = HEALTHY[name]
    model = build()
    with serving(tmp_path / "model", root, model, **options) as (llm, update):
        for step in range(1, 1 + UPDATES):
            assert update(step) == step
        torch.save(model.state_dict(), tmp_path / "state.pt")
        found = llm.collective_rpc(compare_all, args=(tmp_path / "state.pt",))
        assert not any(found), found


def test_matrices_that_a_trainer_transposes_are_not_compared_and_raise_nothing(
    root: Path, tmp_path: Path
) -> None:
    model = make("GPT2", vocab_size=64, n_positions=128, n_embd=128, n_layer=1, n_head=4)
    with serving(tmp_path / "model", root, model, values="all") as (llm, update):
        for step in range(1, 1 + UPDATES):
            assert update(step) == step
        torch.save(model.state_dict(), tmp_path / "state.pt")
        [found] = llm.collective_rpc(compare_all, args=(tmp_path / "state.pt",))
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    expected = [f"transformer.h.0.{each}" for each in ("attn.c_attn.bias", *turned)]
    assert [each for each in found if each.startswith("transformer.h.")] == expected


MIXTURE = {
    **GROUPED,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize("workers", [1, 2])
def test_experts_that_vllm_on_the_cpu_does_not_repack_are_found(
    workers: int, root: Path, tmp_path: Path
) -> None:
    model = make("Qwen3Moe", **MIXTURE)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    options = {"tensor_parallel_size": workers}
    with serving(tmp_path / "model", root, model, **options) as (llm, update):
        # the start of the engine packs them, and vLLM 0.32 does not do it again at an update
        found = llm.collective_rpc(compare_all, args=(tmp_path / "state.pt",))
        assert found == [[]] * workers
        with pytest.raises(
            WeightSyncError, match=r"mlp\.experts does not have .*outputs of expert"
        ):
            update(1)


LAYER = "model.layers.1"


def scale(worker: Any) -> None:
    """Scale a tensor on the way to the loaders."""
    wrap_load(worker, lambda n, t: (n, 1.5 * t if n == f"{LAYER}.mlp.down_proj.weight" else t))


def exchange(worker: Any, one: str, other: str) -> None:
    """Give a tensor to the loaders under the name of another, and the other way."""
    names = {f"{LAYER}.{one}.weight": other, f"{LAYER}.{other}.weight": one}
    wrap_load(worker, lambda n, t: (f"{LAYER}.{names[n]}.weight" if n in names else n, t))


def keep_base(worker: Any) -> None:
    """Load an adapted matrix as it was in the first version: the adapter is not merged."""
    base: dict[str, torch.Tensor] = {}

    def choose(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        is_adapted = name == f"{LAYER}.self_attn.v_proj.weight"
        return name, base.setdefault(name, tensor.clone()) if is_adapted else tensor

    wrap_load(worker, choose)


def drop(worker: Any, dropped: str) -> None:
    """Keep a tensor from the loaders; vLLM then serves the one that it had."""
    wrap_load(worker, lambda n, t: None if n == dropped else (n, t))


def keep_head(worker: Any) -> None:
    """Let the head compute with the packed copy that it had, and not with the tied embedding."""
    head = worker.model_runner.model.lm_head
    head.quant_method.process_weights_after_loading = lambda layer: None


def keep_embedding(worker: Any) -> None:
    """Put the values of the embedding back, whose packed copy the tied head computes with."""
    engine = worker.weight_transfer_engine
    weight = worker.model_runner.model.model.embed_tokens.weight
    before, load = weight.detach().clone(), engine._load

    def load_all_but_embedding(tensors: Any) -> None:
        load(tensors)
        weight.data.copy_(before)

    engine._load = load_all_but_embedding


def wrap_load(worker: Any, change: Callable[[str, torch.Tensor], Any]) -> None:
    model = worker.model_runner.model
    load = model.load_weights
    model.load_weights = lambda tensors: load(filter(None, (change(*each) for each in tensors)))


def mend(worker: Any) -> None:
    model = worker.model_runner.model
    vars(model).pop("load_weights", None)
    vars(worker.weight_transfer_engine).pop("_load", None)
    vars(model.lm_head.quant_method).pop("process_weights_after_loading", None)


FAULTS: dict[str, tuple[Callable[..., None], tuple[str, ...], list[str]]] = {
    "a tensor is scaled": (scale, (), [f"{LAYER}.mlp.down_proj.weight"]),
    "q and k are exchanged": (
        exchange,
        ("self_attn.q_proj", "self_attn.k_proj"),
        [f"{LAYER}.self_attn.{each}_proj.weight" for each in "qk"],
    ),
    "gate and up are exchanged": (
        exchange,
        ("mlp.gate_proj", "mlp.up_proj"),
        [f"{LAYER}.mlp.{each}_proj.weight" for each in ("gate", "up")],
    ),
    "an adapter is not merged": (keep_base, (), [f"{LAYER}.self_attn.v_proj.weight"]),
    "a matrix is stale": (
        drop,
        (f"{LAYER}.self_attn.o_proj.weight",),
        [f"{LAYER}.self_attn.o_proj.weight"],
    ),
    "a norm is stale": (drop, ("model.norm.weight",), ["model.norm.weight"]),
    "a head is stale": (drop, ("lm_head.weight",), ["lm_head.weight"]),
    "an embedding is stale": (
        drop,
        ("model.embed_tokens.weight",),
        ["model.embed_tokens.weight"],
    ),
}
"""What goes wrong -> how it is brought about, and the tensors that are not served."""
TIED_FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    "the head does not follow the embedding": (keep_head, "lm_head.weight"),
    "the embedding does not follow the head": (keep_embedding, "model.embed_tokens.weight"),
}


def names_fault(
    llm: Any, update: Callable[[int], int], step: int, fault: Callable[..., None], *given: str
) -> list[str]:
    """Return the tensors that an update names when the fault comes, after healthy ones."""
    for healthy in (step, step + 1):
        assert update(healthy) == healthy
    llm.collective_rpc(fault, args=given)
    if fault is keep_base:
        assert update(step + 2) == step + 2  # what it serves from then on
    try:
        with pytest.raises(WeightSyncError, match="does not serve what was trained") as raised:
            update(step + 3)
    finally:
        llm.collective_rpc(mend)
    assert llm.get_weight_version() == "unknown"
    assert update(step + 4) == step + 4
    return re.findall(r"does not have ([^:]+):", str(raised.value))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_between_trainer_and_engine_is_named_at_its_update(
    workers: int, root: Path, tmp_path: Path
) -> None:
    model = make("Llama", **SIZES, tie_word_embeddings=False)
    options = {"tensor_parallel_size": workers}
    with serving(tmp_path / "model", root, model, **options) as (llm, update):
        for step, (name, (fault, given, expected)) in enumerate(FAULTS.items(), start=1):
            assert names_fault(llm, update, 10 * step, fault, *given) == expected, name


def test_a_tied_head_that_does_not_serve_the_embedding_is_named(root: Path, tmp_path: Path) -> None:
    model = make("Llama", **SIZES, tie_word_embeddings=True)
    with serving(tmp_path / "model", root, model) as (llm, update):
        for step, (name, (fault, expected)) in enumerate(TIED_FAULTS.items(), start=1):
            found = names_fault(llm, update, 10 * step, fault)
            assert found == [expected], name
