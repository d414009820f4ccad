"""What `load_into` does where the state of a module is not what the module computes with."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, TrainableTokensConfig, VeraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.dtensors import make_dtensor, make_mesh
from tests.support.job import Job
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import fill_states


class Scaled(nn.Linear):
    """Has a scale outside of its parameters, as Transformer Engine has those of FP8."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.rand(3)

    def set_extra_state(self, state: Any) -> None:
        if state is not None:
            self.scale = self.unpack(state)

    def unpack(self, state: Any) -> torch.Tensor:
        return state["scale"]

    def get_extra_state(self) -> Any:
        return {"scale": self.scale.clone(), "recipe": ["delayed", 16]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.sum()


class InTensor(Scaled):
    def get_extra_state(self) -> Any:
        return torch.frombuffer(bytearray(pickle.dumps(self.scale.tolist())), dtype=torch.uint8)

    def unpack(self, state: Any) -> Any:
        return torch.tensor(pickle.loads(state.numpy().tobytes()))


class InFile(Scaled):
    def get_extra_state(self) -> Any:
        torch.save(self.scale, file := io.BytesIO())
        return io.BytesIO(file.getvalue())

    def unpack(self, state: Any) -> Any:
        return torch.load(state)


class Nothing(Scaled):
    def get_extra_state(self) -> Any:
        return None


class Transposed(nn.Linear):
    """Has its weight in the form of a file format."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(self.to_file)
        self.register_load_state_dict_pre_hook(self.from_file)

    @staticmethod
    def to_file(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight").t()

    @staticmethod
    def from_file(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel").t()


class Derived(nn.Linear):
    """Computes with what it derives from its weight after a load."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.derive(self)
        self.register_load_state_dict_post_hook(self.derive)

    def derive(self, *_: Any) -> None:
        self.double = 2 * self.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.double


class Graph(nn.Linear):
    def __init__(self, to: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.to_sparse) -> None:
        super().__init__(4, 4)
        self.register_buffer("adjacency", to(torch.rand(4, 4).round()))


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self[1].weight = self[0].weight


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def language_model(kind: str = "llama", **settings: Any) -> Any:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 4)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    settings = {"vocab_size": 8, "num_hidden_layers": 1, **sizes, **heads, **settings}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


def adapted(config: Any = None, **settings: Any) -> nn.Module:
    config = config or LoraConfig(target_modules=["q_proj"], use_dora=True)
    return get_peft_model(language_model(**settings), config)


def with_adapter() -> nn.Module:
    model = language_model()
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    return model


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "extra state in a dict": Scaled,
    "extra state in a tensor": InTensor,
    "extra state in a file": InFile,
    "no extra state": Nothing,
    "in another module": lambda: nn.Sequential(nn.BatchNorm1d(4), InTensor(), Scaled()),
    "in a wrapper": lambda: nn.DataParallel(InTensor()),
    "renamed and transposed": Transposed,
    "derived after a load": Derived,
    "tied": Tied,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "weight norm in a hook": lambda: weight_norm(nn.Linear(4, 4)),
    "spectral norm in a hook": lambda: spectral_norm(nn.Linear(4, 4)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "pruned": pruned,
    "peft": adapted,
    "add_adapter": with_adapter,
    "quantized": quantized,
    "sparse": Graph,
    "compressed": lambda: Graph(torch.Tensor.to_sparse_csr),
    "lazy": lambda: nn.LazyLinear(4),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 4)),
    "compiled": lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
    "experts": lambda: language_model("mixtral", num_local_experts=2),
    "experts in one tensor": lambda: language_model("gpt_oss", num_local_experts=4, head_dim=2),
    "state space": lambda: language_model("mamba", state_size=2),
    "tied embeddings": lambda: language_model(tie_word_embeddings=True),
    "adalora": lambda: adapted(AdaLoraConfig(target_modules=["q_proj"], total_step=9)),
    "vera": lambda: adapted(VeraConfig(target_modules=["q_proj"], r=2)),
    "tokens": lambda: adapted(TrainableTokensConfig(token_indices=[1]), tie_word_embeddings=True),
    "adapted and tied": lambda: adapted(
        LoraConfig(target_modules=["embed_tokens", "lm_head"]), tie_word_embeddings=True
    ),
}
REFUSED = {"quantized": "_packed_params.* is sparse, nested or quantized"}
REFUSED |= dict.fromkeys(("sparse", "compressed"), "adjacency is sparse, nested or quantized")


def save(job: Job, step: int, state: Any) -> None:
    job.commit_states(step, {"model": state})


def outputs(model: nn.Module) -> torch.Tensor:
    config = getattr(model, "config", None)
    found = model(torch.arange(4)[None]) if config else model.eval()(torch.arange(16.0).view(4, 4))
    return getattr(found, "logits", found).detach()


def states(model: nn.Module) -> list[Any]:
    return [v.getvalue() if isinstance(v, io.BytesIO) else v for v in model.state_dict().values()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_with_what_was_loaded_or_the_load_is_refused_by_name(
    job: Job, name: str
) -> None:
    make = MODULES[name]
    torch.manual_seed(1)
    trained = make() if name != "lazy" else nn.Linear(4, 4)
    torch.manual_seed(2)
    target = make()
    save(job, 1, trained.state_dict())
    if name in REFUSED:
        before = str(states(target))
        with pytest.raises(WeightSyncError, match=REFUSED[name]):
            Checkpoints(job.root).load_into(1, target)
        assert before == str(states(target))
        return
    torch.manual_seed(2)
    expected = make()
    expected.load_state_dict(trained.state_dict())
    Checkpoints(job.root).load_into(1, target)
    assert torch.equal(outputs(target), outputs(expected))
    assert str(states(target)) == str(states(expected))


@pytest.mark.parametrize(
    "name", ["extra state in a dict", "extra state in a tensor", "extra state in a file", "sparse"]
)
def test_a_state_in_the_place_of_its_module_is_refused_where_it_has_copies(
    job: Job, name: str
) -> None:
    save(job, 1, MODULES[name]().state_dict())
    target = MODULES[name]()
    before = target.weight.clone()  # type: ignore[union-attr,operator]
    with pytest.raises(WeightSyncError, match=r"_extra_state is extra state|adjacency is"):
        Checkpoints(job.root).load_into(1, target.state_dict())
    live = {"model": target.state_dict()}
    with pytest.raises(ConfigError, match=r"_extra_state is extra state|adjacency is"):
        fill_states(job.root, read_manifest(job.root, 1), "actor", live)  # type: ignore[arg-type]
    assert torch.equal(before, target.weight)  # type: ignore[arg-type]


def test_a_state_without_extra_state_is_filled_and_one_with_a_tensor_of_its_user_as_a_plain_dict(
    job: Job,
) -> None:
    save(job, 1, Nothing().state_dict())
    own, gone = Nothing(), Nothing().state_dict()
    for target in (own.state_dict(), gone):
        Checkpoints(job.root).load_into(1, target)
    fill_states(job.root, read_manifest(job.root, 1), "actor", {"model": own.state_dict()})  # type: ignore[arg-type]
    assert torch.equal(own.weight, gone["weight"])
    saved, other = nn.Linear(4, 4), nn.Linear(4, 4)
    save(job, 2, saved.state_dict())
    state = other.state_dict()
    state["bias"] = torch.zeros(4)
    with pytest.raises(WeightSyncError, match=r"bias is extra state or a copy, .*dict\(state\)"):
        Checkpoints(job.root).load_into(2, state)
    Checkpoints(job.root).load_into(2, dict(state))
    assert torch.equal(state["bias"], saved.bias)
    assert torch.equal(other.weight, saved.weight)


def test_extra_state_of_a_version_that_a_module_has_not_is_refused(job: Job) -> None:
    save(job, 1, Scaled().state_dict())
    with pytest.raises(WeightSyncError, match="_extra_state is not in what it is loaded into"):
        Checkpoints(job.root).load_into(1, nn.Linear(4, 4))
    save(job, 2, nn.Linear(4, 4).state_dict())
    with pytest.raises(WeightSyncError, match="_extra_state is not in the version"):
        Checkpoints(job.root).load_into(2, InTensor())


def test_extra_state_of_which_each_rank_has_a_part_is_refused(job: Job) -> None:
    job.world_size = 2
    for rank in range(2):
        shard = make_dtensor(torch.ones(3), make_mesh("cpu", rank, 2), torch.Size([6]))
        job.stage(
            1, {"model": Scaled().state_dict() | {"_extra_state": {"scale": shard}}}, rank=rank
        )
    job.commit(1, "model")
    before = (target := Scaled()).scale.clone()
    with pytest.raises(WeightSyncError, match=r"_extra_state is a DTensor of several ranks"):
        Checkpoints(job.root).load_into(1, target)
    assert torch.equal(target.scale, before)
