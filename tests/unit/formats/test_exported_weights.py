"""The weights that come out are those that went in, for each model and each way out.

Small models of each architecture, made from their own configuration classes, go out by a reader
into a model of another dtype, as a folder, as a delta, and as an export; what transformers and PEFT
load there computes the same logits as the trained model.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    CPTConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)

from tests.support.job import Job
from tests.support.weights import VersionFile, upload
from tests.unit.formats.test_export import weights
from tests.unit.formats.test_weight_folder import same
from tests.unit.weights.test_weight_reader import WRAPPERS
from trinity_sync import FolderReader, WeightFolder, WeightReader
from trinity_sync.errors import ConfigError, ExportError
from trinity_sync.formats.hf_export import export_step

TOKENS = torch.arange(2, 14)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
    "fullatt_block_indexes": [0],
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}


@dataclass(frozen=True)
class Kind:
    """A small model."""

    model_type: str
    values: dict[str, Any]
    auto: Any = AutoModelForCausalLM

    def make(self, seed: int = 0) -> Any:
        sizes = {} if self.auto is AutoModelForImageTextToText else SIZES
        config = AutoConfig.for_model(self.model_type, **{**sizes, **self.values})
        torch.manual_seed(seed)
        model = self.auto.from_config(config, attn_implementation="eager")
        config.architectures = [type(model).__name__]
        with torch.no_grad():
            for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name or "bias" in name:
                    parameter.copy_(torch.randn_like(parameter) / 4 + 1)  # not all alike
        return model.eval()


KINDS = {
    "qwen2": Kind("qwen2", {}),
    "qwen2 tied": Kind("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Kind("qwen3", {"tie_word_embeddings": True}),
    "llama": Kind("llama", {"tie_word_embeddings": False}),
    "mistral": Kind("mistral", {"sliding_window": 8}),
    "gemma3": Kind("gemma3_text", {"sliding_window": 8}),
    "phi3": Kind("phi3", {}),
    "olmo2": Kind("olmo2", {}),
    "gpt2": Kind("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "gpt_neox": Kind("gpt_neox", {}),
    "qwen2 critic": Kind("qwen2", {"num_labels": 1}, AutoModelForTokenClassification),
    "mixtral": Kind("mixtral", EXPERTS),
    "qwen3_moe": Kind("qwen3_moe", EXPERTS),
    "gpt_oss": Kind("gpt_oss", EXPERTS),
    "deepseek_v3": Kind("deepseek_v3", {**ROUTED, **LATENT}),
    "glm4_moe": Kind("glm4_moe", ROUTED),
    "hunyuan_v1_moe": Kind("hunyuan_v1_moe", EXPERTS),  # makes its routers in float32
    "qwen2_5_vl": Kind(
        "qwen2_5_vl",
        {
            "text_config": {**SIZES, "rope_parameters": ROPE},
            "vision_config": VISION,
            "tie_word_embeddings": True,
        },
        AutoModelForImageTextToText,
    ),
}


def compute(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def load(kind: Kind, folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    return kind.auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def commit(job: Job, folder: Path, step: int, state: dict[str, Any], config: Any) -> None:
    """Commit a state with the config of its model, as the FSDP manager does."""
    (folder / "huggingface").mkdir(parents=True)
    config.save_pretrained(folder / "huggingface")
    job.stage(step, {"model": state}, metadata=folder)
    job.commit(step, "model", "metadata")


def publish(job: Job, folder: WeightFolder, step: int, state: Any) -> Path:
    versions = VersionFile(job.root.with_name("version.json"))
    versions.tell(upload(job, step, state))
    with WeightReader(versions, name="folder") as reader:
        return folder.publish(reader).folder


QUICK = {"qwen2 tied", "gpt2", "qwen3_moe", "glm4_moe", "qwen2_5_vl"}
QUICK |= {"hunyuan_v1_moe", "qwen2 critic"}
QUICK_ADAPTERS = {"rsLoRA", "DoRA", "a trained head of a tied model", "trained tokens", "PiSSA"}
QUICK_ADAPTERS |= {"ranks and alphas", "expert parameters", "embeddings trained in place"}
QUICK_ALONE = {"a trained head", "biases", "a tensor that layers share"}


def mark_slow(names: Iterable[str], quick: set[str]) -> list[Any]:
    """All of them take minutes, and most are alike."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mark_slow(KINDS, QUICK))
def test_a_model_comes_out_as_it_went_in(job: Job, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    trained, served = kind.make(), kind.make(seed=1)
    served.save_pretrained(tmp_path / "served")
    before = compute(trained)
    assert not torch.equal(before, compute(served))
    trained.save_pretrained(tmp_path / "theirs")
    rounded = load(kind, tmp_path / "theirs", torch.bfloat16)
    rounded.save_pretrained(tmp_path / "rounded")

    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.config)
    export_step(job.root, 1, to=tmp_path / "exported", max_shard_bytes=5000)
    assert same(weights(tmp_path / "exported"), weights(tmp_path / "theirs"))
    exported = load(kind, tmp_path / "exported")
    assert torch.equal(compute(exported), before)
    assert_equal(exported, trained)
    export_step(job.root, 1, to=tmp_path / "exported", dtype="bf16")
    assert same(weights(tmp_path / "exported"), weights(tmp_path / "rounded"))
    assert_equal(load(kind, tmp_path / "exported"), rounded)  # as its config says

    versions = VersionFile(tmp_path / "version.json")
    folder = WeightFolder(tmp_path / "out", tmp_path / "served", deltas=1)
    first = publish(job, folder, 1, trained.state_dict(keep_vars=True))
    assert same(weights(first), weights(tmp_path / "theirs"))
    assert torch.equal(compute(load(kind, first)), before)

    target = load(kind, tmp_path / "served", torch.bfloat16)
    with WeightReader(versions, name="reader", dtype=torch.bfloat16) as reader:
        reader.load_into(target)
        assert_equal(target, rounded)
        small = WeightFolder(tmp_path / "small", tmp_path / "served").publish(reader)
        assert_equal(load(kind, small.folder), rounded)

    with torch.no_grad():
        [p for n, p in trained.named_parameters() if "norm" in n or "ln_" in n][-1].mul_(1.5)
    after = compute(trained)
    assert not torch.equal(after, before)
    publish(job, folder, 2, trained.state_dict(keep_vars=True))
    follower = FolderReader(tmp_path / "out")
    copied = WeightFolder(tmp_path / "copy", tmp_path / "served").publish(follower)
    assert follower.version.base == 1
    assert torch.equal(compute(load(kind, copied.folder)), after)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Compare dtypes and bits of all tensors; what transformers keeps in float32 is one of them."""
    left, right = one.state_dict(), other.state_dict()
    assert {n: t.dtype for n, t in left.items()} == {n: t.dtype for n, t in right.items()}
    assert [n for n in left if not torch.equal(left[n], right[n])] == []


def test_half_precision_keeps_what_transformers_keeps_for_it(job: Job, tmp_path: Path) -> None:
    kind = KINDS["gpt_oss"]
    trained = kind.make()
    trained.save_pretrained(tmp_path / "theirs")
    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.config)
    export_step(job.root, 1, to=tmp_path / "exported", dtype="fp16")
    found = load(kind, tmp_path / "exported", torch.float16)
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    assert load_file(file)["model.embed_tokens.weight"].dtype is torch.float16
    assert found.model.norm.weight.dtype is torch.float32
    assert_equal(found, load(kind, tmp_path / "theirs", torch.float16))


def test_the_dtype_in_the_config_is_that_of_most_elements(job: Job, tmp_path: Path) -> None:
    kind = KINDS["qwen2"]
    trained = kind.make().bfloat16()
    trained.save_pretrained(tmp_path / "served")
    small = [p for n, p in trained.named_parameters() if re.search("norm|bias|k_proj|v_proj", n)]
    assert len(small) > len([*trained.parameters()]) / 2
    for parameter in small:
        parameter.data = parameter.data.float()
    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.config)
    export_step(job.root, 1, to=tmp_path / "exported")
    folder = WeightFolder(tmp_path / "out", tmp_path / "served")
    for each in (tmp_path / "exported", publish(job, folder, 1, trained.state_dict())):
        assert load(kind, each).get_input_embeddings().weight.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_router_biases_keep_their_digits(job: Job, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    trained = kind.make()
    trained.save_pretrained(tmp_path / "served")
    biases = {n: b for n, b in trained.named_buffers() if n.endswith("e_score_correction_bias")}
    close = torch.tensor([6.900, 6.901, 6.902, 6.903])
    for bias in biases.values():
        bias.copy_(close)
    assert biases
    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.config)
    export_step(job.root, 1, to=tmp_path / "exported", dtype="bf16")
    versions = VersionFile(tmp_path / "version.json")
    versions.tell(upload(job, 1, trained.state_dict()))
    with WeightReader(versions, name="reader", dtype=torch.bfloat16) as reader:
        folder = WeightFolder(tmp_path / "out", tmp_path / "served")
        with (
            reader.open() as view,
            pytest.raises(ConfigError, match="e_score_correction_bias is rounded"),
        ):
            folder.publish(view)
        published = folder.publish(reader).folder
    for each in (tmp_path / "exported", published):
        found = load(kind, each, torch.bfloat16).state_dict()
        assert all(torch.equal(found[n], close) for n in biases)
        assert found["model.embed_tokens.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "name", mark_slow(["qwen2 tied", "gemma3", "qwen2_5_vl", "gpt2"], {"qwen2_5_vl"})
)
def test_a_head_that_is_no_longer_tied_is_not_lost(job: Job, tmp_path: Path, name: str) -> None:
    """Equal bits decide, not the config, which still says that it is tied."""
    kind = KINDS[name]
    trained = kind.make()
    trained.save_pretrained(tmp_path / "served")
    commit(job, tmp_path / "tied", 1, trained.state_dict(), trained.config)
    head = trained.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    folder = WeightFolder(tmp_path / "out", tmp_path / "served", deltas=2)
    for step, factor in enumerate((1.0, 1.5, 1.0), 2):  # apart, but equal; other; other again
        with torch.no_grad():
            head.weight.mul_(factor)
        published = publish(job, folder, step, trained.state_dict(keep_vars=True))
        commit(job, tmp_path / f"apart {step}", step, trained.state_dict(), trained.config)
        export_step(job.root, step, to=tmp_path / "exported")
        expected = compute(trained)
        if step != 4:
            assert torch.equal(compute(load(kind, published)), expected)
        loaded = load(kind, tmp_path / "exported")
        assert torch.equal(compute(loaded), expected)
        is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert is_tied == (step == 2)
        copied = WeightFolder(tmp_path / "copy", tmp_path / "served").publish(
            FolderReader(tmp_path / "out")
        )
        assert torch.equal(compute(load(kind, copied.folder)), expected)
    with pytest.raises(ExportError, match="export to a FOLDER"):
        export_step(job.root, 3)


def test_a_head_that_the_trainer_ties_and_the_config_does_not_is_written_twice(
    job: Job, tmp_path: Path
) -> None:
    kind = KINDS["qwen2"]
    trained = kind.make()
    trained.save_pretrained(tmp_path / "served")
    trained.lm_head.weight = trained.model.embed_tokens.weight
    folder = WeightFolder(tmp_path / "out", tmp_path / "served")
    published = publish(job, folder, 1, trained.state_dict(keep_vars=True))
    assert torch.equal(compute(load(kind, published)), compute(trained))


@pytest.mark.parametrize(
    "wrapper", mark_slow(sorted(WRAPPERS.keys() - {"plain"}), {"both", "activation checkpointing"})
)
def test_a_wrapped_model_comes_out_as_the_plain_one(job: Job, tmp_path: Path, wrapper: str) -> None:
    kind = KINDS["qwen3_moe"]
    trained = kind.make()
    trained.save_pretrained(tmp_path / "served")
    expected, config = compute(trained), trained.config
    wrapped = WRAPPERS[wrapper](trained)
    state = wrapped.state_dict(keep_vars=True)
    if wrapper == "activation checkpointing":  # named_parameters has the wrapper's name
        state = {n.replace("o_proj", "o_proj._checkpoint_wrapped_module"): state[n] for n in state}
    versions = VersionFile(tmp_path / "version.json")
    published = publish(job, WeightFolder(tmp_path / "out", tmp_path / "served"), 1, state)
    assert torch.equal(compute(load(kind, published)), expected)
    commit(job, tmp_path / "metadata", 1, state, config)
    export_step(job.root, 1, to=tmp_path / "exported")
    assert torch.equal(compute(load(kind, tmp_path / "exported")), expected)
    target = kind.make(seed=1)
    with WeightReader(versions, name="reader") as reader:
        reader.load_into(WRAPPERS[wrapper](target))
    assert torch.equal(compute(target), expected)


def test_a_config_of_quantized_weights_is_refused_for_those_of_the_trainer(
    job: Job, tmp_path: Path
) -> None:
    trained = KINDS["qwen2"].make()
    trained.config.quantization_config = {"quant_method": "fp8"}
    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.config)
    with pytest.raises(ExportError, match="quantized, and the trained ones are not"):
        export_step(job.root, 1, to=tmp_path / "exported")


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {n: t for n, t in state.items() if n != name}


UNLOADABLE: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "one layer is missing": (
        lambda state: {n: t for n, t in state.items() if ".layers.1." not in n},
        r"layers\.1\.input_layernorm\.weight is missing",
    ),
    "layers only": (
        lambda state: {n: t for n, t in state.items() if ".layers." in n},
        r"lm_head\.weight is missing; model\.embed_tokens\.weight is missing",
    ),
    "one tensor is missing": (without("model.norm.weight"), r"model\.norm\.weight is missing"),
    "a part of the experts is missing": (
        without("model.layers.0.mlp.experts.down_proj"),
        r"model\.layers\.0\.mlp\.experts\.down_proj is missing",
    ),
    "a prefix of the trainer": (
        lambda state: {f"policy.{n}": t for n, t in state.items()},
        r"lm_head\.weight is missing",
    ),
    "one tensor more": (
        lambda state: {**state, "value_head.weight": torch.ones(3)},
        r"value_head\.weight is unknown",
    ),
    "another vocabulary": (
        lambda state: {**state, "model.embed_tokens.weight": torch.ones(41, 16)},
        r"model\.embed_tokens\.weight is \[41, 16\], not \[40, 16\]",
    ),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_what_no_engine_loads_is_refused_before_a_byte_is_written(
    job: Job, tmp_path: Path, case: str
) -> None:
    alter, said = UNLOADABLE[case]
    trained = KINDS["qwen3_moe"].make()
    trained.save_pretrained(tmp_path / "served")
    state = alter(trained.state_dict())
    folder = WeightFolder(tmp_path / "out", tmp_path / "served")
    with pytest.raises(ExportError, match=said):
        publish(job, folder, 1, state)
    assert folder.latest() is None
    assert {each.name for each in (tmp_path / "out").iterdir()} == {".publisher.lock", ".job.lock"}
    commit(job, tmp_path / "metadata", 1, state, trained.config)
    with pytest.raises(ExportError, match=said):
        export_step(job.root, 1, to=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@dataclass(frozen=True)
class Adapted:
    """An adapter of a small model; its values are those of `LoraConfig`."""

    values: dict[str, Any]
    kind: str = "qwen2"
    trains_embeddings: bool = False
    shares: bool = False
    """Whether the layers have one tensor in common."""

    def make(self, base: Path) -> Any:
        """Make a model with the adapter, as it is after a training."""
        model = load(KINDS[self.kind], base)
        values = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **self.values}
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **values))
        if self.trains_embeddings:
            adapted.get_input_embeddings().requires_grad_(True)
        if self.shares:
            first, *others = (m.lora_A for n, m in adapted.named_modules() if n.endswith("q_proj"))
            for each in others:
                each["default"].weight = first["default"].weight
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) / 4)
        return adapted.eval()


ADAPTERS = {
    "LoRA": Adapted({}),
    "rsLoRA": Adapted({"use_rslora": True}),
    "DoRA": Adapted({"use_dora": True}),
    "a trained head": Adapted({"modules_to_save": ["lm_head"]}),
    "a trained head of a tied model": Adapted({"modules_to_save": ["lm_head"]}, "qwen2 tied"),
    "trained embeddings and head": Adapted({"modules_to_save": ["embed_tokens", "lm_head"]}),
    "embeddings trained in place": Adapted({}, trains_embeddings=True),
    "embeddings with LoRA": Adapted({"target_modules": ["embed_tokens", "q_proj"]}),
    "trained tokens": Adapted({"trainable_token_indices": {"embed_tokens": [3, 5]}}),
    "all linear layers": Adapted({"target_modules": "all-linear", "lora_bias": False}),
    "a pattern of modules": Adapted({"target_modules": r".*\.1\.self_attn\.[qk]_proj"}),
    "layers by number": Adapted({"layers_to_transform": [1]}),
    "ranks and alphas": Adapted(
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}, "bias": "none"}
    ),
    "biases": Adapted({"bias": "lora_only"}),
    "a tensor that layers share": Adapted({}, shares=True),
    "PiSSA": Adapted({"init_lora_weights": "pissa"}),
    "expert parameters": Adapted(
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, "qwen3_moe"
    ),
    "a model with latent attention": Adapted(
        {"target_modules": ["q_a_proj", "kv_b_proj"]}, "deepseek_v3"
    ),
}


@pytest.mark.parametrize("name", mark_slow(ADAPTERS, QUICK_ADAPTERS))
def test_an_adapter_comes_out_as_it_went_in(job: Job, tmp_path: Path, name: str) -> None:
    adapted = ADAPTERS[name]
    kind, base = KINDS[adapted.kind], tmp_path / "base"
    kind.make().save_pretrained(base)
    trained = adapted.make(base)
    expected = compute(trained)
    assert not torch.equal(expected, compute(load(kind, base)))
    config = trained.peft_config["default"]

    metadata = tmp_path / "metadata"
    config.save_pretrained(metadata / "lora_adapter")
    commit(job, metadata, 1, trained.state_dict(), trained.config)
    export_step(job.root, 1, to=tmp_path / "exported")
    loaded = load(kind, tmp_path / "exported")
    exported = PeftModel.from_pretrained(loaded, tmp_path / "exported/lora_adapter")
    assert torch.equal(compute(exported), expected)
    export_step(job.root, 1)  # into the step

    versions = VersionFile(tmp_path / "version.json")
    versions.tell(upload(job, 1, trained.state_dict(keep_vars=True)))
    target = adapted.make(base)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    with WeightReader(versions, name="reader") as reader:
        reader.load_into(target)
    assert torch.equal(compute(target), expected)


@pytest.mark.parametrize(
    "name",
    mark_slow([n for n in ADAPTERS if n != "PiSSA"], QUICK_ALONE),
)
@pytest.mark.parametrize("knows_base", [True, False])
def test_the_tensors_of_an_adapter_alone_are_published_as_peft_reads_them(
    job: Job, tmp_path: Path, name: str, knows_base: bool
) -> None:
    adapted = ADAPTERS[name]
    kind, base = KINDS[adapted.kind], tmp_path / "base"
    kind.make().save_pretrained(base)
    trained = adapted.make(base)
    config = trained.peft_config["default"]
    config.base_model_name_or_path = str(base) if knows_base else None
    config.save_pretrained(tmp_path / "adapter")
    state = get_peft_model_state_dict(trained, save_embedding_layers=adapted.trains_embeddings)
    folder = WeightFolder(tmp_path / "out", tmp_path / "adapter")
    published = publish(job, folder, 1, state)
    assert {path.name for path in published.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "version.json")
    }
    assert torch.equal(
        compute(PeftModel.from_pretrained(load(kind, base), published)), compute(trained)
    )


def test_an_adapter_that_was_saved_alone_is_exported_alone(job: Job, tmp_path: Path) -> None:
    """As with veRL's ``save_lora_only``, under the names that it has in the model."""
    adapted, kind = ADAPTERS["rsLoRA"], KINDS["qwen2"]
    kind.make().save_pretrained(tmp_path / "base")
    trained = adapted.make(tmp_path / "base")
    state = {name: value for name, value in trained.state_dict().items() if "lora_" in name}
    commit(job, tmp_path / "without", 1, state, trained.config)
    with pytest.raises(ExportError, match=r"the step has no lora_adapter/adapter_config\.json"):
        export_step(job.root, 1, to=tmp_path / "exported")
    trained.peft_config["default"].save_pretrained(tmp_path / "metadata/lora_adapter")
    commit(job, tmp_path / "metadata", 2, state, trained.config)
    export_step(job.root, 2, to=tmp_path / "exported")
    assert not [*(tmp_path / "exported").glob("*.safetensors")]
    base = load(kind, tmp_path / "base")
    found = PeftModel.from_pretrained(base, tmp_path / "exported/lora_adapter")
    assert torch.equal(compute(found), compute(trained))


OTHER_ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another rank": ({}, {"r": 2}, r"PEFT cannot load the adapter"),
    "other modules": ({}, {"target_modules": ["q_proj"]}, r"the model does not have .*v_proj"),
    "more modules": (
        {},
        {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        r"does not have .*o_proj",
    ),
    "a module that is not there": ({}, {"target_modules": ["c_attn"]}, r"PEFT cannot apply"),
    "no magnitudes": ({"use_dora": True}, {}, r"does not have .*lora_magnitude_vector"),
    "no trained head": ({"modules_to_save": ["lm_head"]}, {}, r"lm_head\.modules_to_save"),
}


@pytest.mark.parametrize("case", OTHER_ADAPTERS)
def test_an_adapter_with_the_config_of_another_one_is_refused_by_name(
    job: Job, tmp_path: Path, case: str
) -> None:
    ours, theirs, said = OTHER_ADAPTERS[case]
    KINDS["qwen2"].make().save_pretrained(tmp_path / "base")
    trained = Adapted(ours).make(tmp_path / "base")
    values = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **theirs}
    LoraConfig(**values).save_pretrained(tmp_path / "metadata/lora_adapter")
    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.config)
    with pytest.raises(ExportError, match=said):
        export_step(job.root, 1, to=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, CPTConfig])
def test_an_adapter_that_peft_computes_is_refused_with_what_saves_it(
    job: Job, tmp_path: Path, kind: Any
) -> None:
    KINDS["qwen2"].make().save_pretrained(tmp_path / "base")
    size = "cpt_token_ids" if kind is CPTConfig else "num_virtual_tokens"
    config = kind(task_type="CAUSAL_LM", **{size: [1, 2, 3, 4] if kind is CPTConfig else 4})
    trained = get_peft_model(load(KINDS["qwen2"], tmp_path / "base"), config)
    config.save_pretrained(tmp_path / "metadata/lora_adapter")
    commit(job, tmp_path / "metadata", 1, trained.state_dict(), trained.base_model.config)
    with pytest.raises(ExportError, match=r"PEFT computes tensors .* save the adapter with PEFT"):
        export_step(job.root, 1, to=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_trained_head_that_was_not_saved_is_missed_by_name(job: Job, tmp_path: Path) -> None:
    KINDS["qwen2"].make().save_pretrained(tmp_path / "base")
    trained = ADAPTERS["a trained head"].make(tmp_path / "base")
    state = {name: value for name, value in trained.state_dict().items() if "lora_" in name}
    trained.peft_config["default"].save_pretrained(tmp_path / "metadata/lora_adapter")
    commit(job, tmp_path / "metadata", 1, state, trained.config)
    with pytest.raises(ExportError, match=r"the step lacks base_model\.model\.lm_head\.weight"):
        export_step(job.root, 1, to=tmp_path / "exported")
