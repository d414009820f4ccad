"""The callback for Hugging Face's Trainer: saved by steps, resumed bit-equal, failures raised."""

import pickle
import random
import re
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.parametrizations import weight_norm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HPSearchBackend, get_last_checkpoint

from tests.integration.fsdp.commits import CommitsHere, Fails
from tests.support.models import configure
from tests.support.states import copied, differences
from tests.trainers.local_saves import (
    TOKENS,
    commit_here,
    make_gpt2,
    mapped_sizes,
    replace_files,
)
from trinity_sync import CommitError, ConfigError, SaveFailedError, WeightReader
from trinity_sync.formats.hf_export import export_step
from trinity_sync.integrations import huggingface_state, trainer_saves
from trinity_sync.integrations.huggingface import TrinitySyncCallback
from trinity_sync.integrations.huggingface_state import (
    FSDP,
    get_adapter_state,
    has_own_embeddings,
    list_unsupported,
)
from trinity_sync.integrations.trainer_saves import BEST
from trinity_sync.layout import steps_on_disk
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.discovery import list_known_runs
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.steps_in_use import list_pins, pin_ahead

MakeCallback = Callable[..., TrinitySyncCallback]


@pytest.fixture(autouse=True)
def one_thread(nothing_is_left_behind: None) -> None:
    torch.set_num_threads(1)


class At(TrainerCallback):
    """Calls a function with the trainer's control at the end of a step."""

    def __init__(self, step: int, call: Callable[[Any], object]) -> None:
        self.step, self.call = step, call

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == self.step:
            self.call(control)


def stop_training(control: Any) -> None:
    control.should_training_stop = True


@pytest.fixture
def callback(tmp_path: Path, spool_folder: Path) -> MakeCallback:
    """Makes a callback whose saves need no server, by default for the root ``ckpts``."""

    def make(root: str = "ckpts", trigger: CommitsHere | None = None) -> TrinitySyncCallback:
        return TrinitySyncCallback(tmp_path / root, **commit_here(tmp_path, spool_folder, trigger))

    return make


def hugging_face(
    saves: TrinitySyncCallback,
    stop: int = 99,
    adapter: LoraConfig | None = None,
    of: type[Trainer] = Trainer,
    model: Any = None,
    processing_class: Any = None,
    out: str = "out",
    **arguments: Any,
) -> Any:
    """A trainer whose own folder is ``out``, next to the root of its saves."""
    torch.manual_seed(0)
    given = TrainingArguments(
        output_dir=str(saves.root.with_name(out)),
        max_steps=12,
        per_device_train_batch_size=4,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        seed=7,
        **{"save_total_limit": 3, **arguments},
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    model = model or make_gpt2()
    return of(
        get_peft_model(model, adapter) if adapter else model,
        given,
        train_dataset=data,
        eval_dataset=data[:4],
        processing_class=processing_class,
        callbacks=[saves, At(stop, stop_training)],
    )


def train(saves: TrinitySyncCallback, stop: int = 99, **how: Any) -> Any:
    """Train from the newest step of a root, if it has one; return the trainer."""
    trainer = hugging_face(saves, stop, **how)
    trainer.train(resume_from_checkpoint=saves.latest())
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }


class Look(TrainerCallback):
    """Looks at the memory of the saves, once what touches it has ended, before the first step."""

    def __init__(self, saves: TrinitySyncCallback) -> None:
        self.saves, self.sizes = saves, dict[str, int]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.sizes = self.sizes or mapped_sizes(self.saves._saves)


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["c_attn"])])
def test_the_memory_of_the_first_save_is_touched_before_it(
    callback: MakeCallback, adapter: LoraConfig | None
) -> None:
    look = Look(saves := callback())
    trainer = hugging_face(saves, stop=1, adapter=adapter, model=make_gpt2(n_embd=256))
    trainer.add_callback(look)
    trainer.train()
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    for name, least in (("model", trained), ("optim", 2 * trained)):
        assert least <= look.sizes[name] <= least + (4 << 20)


def test_a_trainer_is_told_before_it_trains_that_its_saves_may_not_fit(
    tmp_path: Path, spool_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = trainer_saves.TrainerSaves(tmp_path / "ckpts", **commit_here(tmp_path, spool_folder))

    class OfEightBits(torch.optim.AdamW):
        """An optimizer of another library, whose states are smaller than torch's."""

    saves.prewarm(1 << 50, [OfEightBits([torch.nn.Parameter(torch.zeros(3))])])
    saves.close()
    need = f"the images of this job need {2 << 50:,} bytes"  # in two slots
    assert f"Saves will be slow, or fail: {need}" in caplog.text
    assert "--shm-size" in caplog.text


def test_a_training_that_saves_nothing_makes_no_root(callback: MakeCallback) -> None:
    saves = callback()
    hugging_face(saves, stop=1, save_strategy="no").train()
    assert not saves.root.exists()


def test_a_hugging_face_trainer_resumes_bit_equal_in_mid_epoch(
    tmp_path: Path, callback: MakeCallback
) -> None:
    whole = train(callback("whole"))
    train(callback(), stop=11)
    assert max(steps_on_disk(tmp_path / "ckpts")) == 10  # eight steps are an epoch
    assert list((tmp_path / "out").glob("checkpoint-*")) == []

    torch.manual_seed(99)
    resumed = train(callback())
    assert resumed.state.global_step == 12
    assert differences(state_of(whole), state_of(resumed)) == []


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_step_is_a_model_that_from_pretrained_loads_and_an_export_writes(
    callback: MakeCallback, kind: str, tmp_path: Path
) -> None:
    words = {"[UNK]": 0, **{f"word{i}": i for i in range(1, 64)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[UNK]"
    )
    saves = callback()
    given: dict[str, Any] = {"processing_class": tokenizer}
    auto: Any = AutoModelForCausalLM
    if kind == "bert":
        auto = AutoModelForMaskedLM
        given["model"] = BertForMaskedLM(configure(BertConfig, 64, 16))
    trainer = hugging_face(saves, stop=4, **given)
    trainer.train()
    export_step(tmp_path / "ckpts", 4, to=tmp_path / "exported")
    for folder in (saves.latest(), tmp_path / "exported"):
        loaded = dict(auto.from_pretrained(folder).state_dict())
        assert differences(dict(trainer.model.state_dict()), loaded) == []
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == words


class Begun(TrainerCallback):
    """Keeps the weights that a training begins with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.weights = copied(dict(parts["model"].state_dict()))


def test_a_hugging_face_trainer_loads_the_files_that_were_compared(
    tmp_path: Path, callback: MakeCallback
) -> None:
    root = tmp_path / "ckpts"
    saves = callback()
    first = hugging_face(saves, stop=4)
    first.train()
    newest, begun = saves.latest(), Begun()
    assert newest
    replace_files(root / "global_step_4", "actor/*.pt", "attachments/*")
    resumed = hugging_face(saves, stop=5)
    resumed.add_callback(begun)
    resumed.train(resume_from_checkpoint=newest)
    assert differences(dict(first.model.state_dict()), begun.weights) == []
    assert not Path(newest).exists()  # nothing keeps the space of a step that is removed


def test_a_training_that_has_checkpoints_of_trainer_is_told_how_to_go_on_from_them(
    tmp_path: Path, callback: MakeCallback, caplog: pytest.LogCaptureFixture
) -> None:
    out, begun = str(tmp_path / "out"), Begun()
    first: Any = hugging_face(callback("unused"), stop=4)
    first.pop_callback(TrinitySyncCallback)
    first.train()
    line = f"saves.latest() or get_last_checkpoint({out!r})"
    for resumes in (False, True):
        saves = callback()
        trainer = hugging_face(saves, stop=6 if resumes else 1)
        trainer.add_callback(begun)
        caplog.clear()
        trainer.train(
            resume_from_checkpoint=saves.latest() or (get_last_checkpoint(out) if resumes else None)
        )
        assert (line in caplog.text) is not resumes
    assert differences(dict(first.model.state_dict()), begun.weights) == []
    assert max(steps_on_disk(tmp_path / "ckpts")) == 6
    with pytest.raises(ConfigError, match=r"of step 4, .* has step 6: resume with .*latest\(\)"):
        hugging_face(callback()).train(resume_from_checkpoint=True)
    without = hugging_face(saves)
    without.pop_callback(TrinitySyncCallback)
    without.add_callback(begun)
    without.train(resume_from_checkpoint=saves.latest())
    assert differences(dict(trainer.model.state_dict()), begun.weights) == []
    assert (tmp_path / "out/checkpoint-12").is_dir()


class WithMoments(Trainer):
    """Keeps running moments of its weights, and saves them next to the optimizer and the model."""

    moments = torch.zeros(16)
    saved_models = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.moments = 0.9 * self.moments + self.model.transformer.ln_f.bias.detach()
        return super().training_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(self.moments, Path(output_dir) / "moments.pt")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        self.saved_models += 1
        (Path(output_dir) / "models.txt").write_text(str(self.saved_models))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.saved_models = int((Path(resume_from_checkpoint) / "models.txt").read_text())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.moments = torch.load(Path(checkpoint) / "moments.pt")


def test_what_a_subclass_also_saves_is_resumed_as_from_trainers_own_checkpoint(
    tmp_path: Path, callback: MakeCallback
) -> None:
    def state(trainer: Any) -> dict[str, Any]:
        return {**state_of(trainer), "moments": trainer.moments, "models": trainer.saved_models}

    whole = train(callback("whole"), of=WithMoments)
    assert whole.moments.any()
    train(callback(), stop=6, of=WithMoments)
    resumed = train(callback(), of=WithMoments)
    assert differences(state(whole), state(resumed)) == []

    host, by_host = (hugging_face(callback(), n, of=WithMoments, out="host") for n in (6, 99))
    for trainer, checkpoint in ((host, None), (by_host, str(tmp_path / "host/checkpoint-6"))):
        trainer.pop_callback(TrinitySyncCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
    assert differences(state(by_host), state(resumed)) == []


class OfTRL(Trainer):
    """Writes into ``checkpoint-N`` as TRL's GRPO (after `Trainer`) and its AsyncGRPO (before)."""

    __module__ = "trl.trainer"
    resumed_at: list[str]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rollout_state.json").write_text(str(self.state.global_step))
        super()._save_checkpoint(model, trial)
        (folder / "entropy_ctrl_state.json").write_text(str(self.state.global_step / 4))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            names = "rollout_state.json", "entropy_ctrl_state.json"
            self.resumed_at = [Path(checkpoint, name).read_text() for name in names]


def test_what_trls_trainers_write_into_a_checkpoint_is_saved_and_loaded(
    tmp_path: Path, callback: MakeCallback
) -> None:
    hugging_face(callback(), stop=6, of=OfTRL).train()
    assert not [*(tmp_path / "out").glob("checkpoint-*")]
    saves = callback()
    resumed = hugging_face(saves, of=OfTRL)
    resumed.train(resume_from_checkpoint=saves.latest())
    assert resumed.resumed_at == ["6", "1.5"]
    assert max(steps_on_disk(tmp_path / "ckpts")) == 12


class WritesAll(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)


class ReplacesSaves(Trainer):
    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)


def test_what_a_subclass_saves_in_its_own_way_is_refused_by_name(callback: MakeCallback) -> None:
    for of, told in (
        (ReplacesSaves, r"not save what ReplacesSaves\._save_checkpoint may save"),
        (WritesAll, r"step 2: WritesAll writes model\.safetensors, which cannot be saved"),
    ):
        with pytest.raises(ConfigError, match=told):
            hugging_face(callback(), of=of).train()


class ReadsCheckpoints(TrainerCallback):
    """Reads what was saved, as W&B's callback with ``WANDB_LOG_MODEL=checkpoint``."""

    _log_model = "checkpoint"

    def __init__(self) -> None:
        self.read: dict[int, dict[str, Any]] = {}
        self.trained: dict[int, dict[str, Any]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert [*folder.parent.glob("checkpoint-*")] == [folder]
        assert {"optimizer.pt", "trainer_state.json"} <= {path.name for path in folder.iterdir()}
        self.read[state.global_step] = torch.load(folder / "pytorch_model.bin")
        self.trained[state.global_step] = copied(dict(parts["model"].state_dict()))


def test_a_callback_that_reads_the_checkpoint_of_a_save_finds_it_committed(
    tmp_path: Path, callback: MakeCallback
) -> None:
    trainer, reads = hugging_face(callback(), 4), ReadsCheckpoints()
    trainer.add_callback(reads)
    trainer.train()
    assert sorted(reads.read) == [2, 4]
    assert differences(reads.trained, reads.read) == []
    assert not [*(tmp_path / "out").glob("checkpoint-*")]

    (old := tmp_path / "out/checkpoint-2").mkdir()
    trainer = hugging_face(saves := callback("afresh"), 2)
    trainer.add_callback(reads)
    with pytest.raises(ConfigError, match=rf"in {old}, where another one is; move that away"):
        trainer.train()
    saves.on_train_end(None, None, None)


class Copied(CommitsHere):
    def __reduce__(self) -> Any:
        return Copied, ()


def test_a_copy_of_a_callback_that_saves_has_saves_of_its_own(
    tmp_path: Path, callback: MakeCallback
) -> None:
    saves = callback(trigger=Copied())
    trainer, copies = hugging_face(saves, 4), []
    trainer.add_callback(At(3, lambda _: copies.append(pickle.loads(pickle.dumps(saves)))))
    trainer.train()
    assert steps_on_disk(tmp_path / "ckpts") == [2, 4]
    (copied_in_training,) = copies
    assert str(copied_in_training.latest()).endswith("checkpoint-4")
    copied_in_training.on_train_end(None, None, None)


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def test_a_hugging_face_training_that_raised_goes_on_with_the_same_callback(
    tmp_path: Path, callback: MakeCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_RUN_KEY", "of-the-process")
    root = tmp_path / "ckpts"
    saves = callback()

    def train(stop: int, resume: bool, interrupted_at: int = 99) -> None:
        trainer = hugging_face(saves, stop, save_total_limit=None)
        trainer.add_callback(At(interrupted_at, interrupt))
        trainer.train(resume_from_checkpoint=saves.latest() if resume else None)

    with pytest.raises(KeyboardInterrupt):
        train(99, False, interrupted_at=5)
    saves._get_saves().wait_all()
    train(6, True)
    train(8, True)  # after a training that has ended
    with pytest.raises(KeyboardInterrupt):
        train(99, True, interrupted_at=11)
    saves._get_saves().wait_all()
    train(10, False)  # afresh, to the step that was saved last
    begun = [(run.number, run.resumed_from) for run in list_known_runs(root)]
    assert begun == [(1, 0), (2, 4), (3, 6), (4, 8), (5, 0)]
    assert read_run_number(root, 10) == 5


def test_a_batch_that_does_not_fit_begins_the_training_again(
    tmp_path: Path, callback: MakeCallback
) -> None:
    trainer = hugging_face(callback(), 4, auto_find_batch_size=True)
    trainer.add_callback(At(3, exhaust_once()))
    trainer.train()
    assert steps_on_disk(tmp_path / "ckpts") == [2, 4]
    assert read_run_number(tmp_path / "ckpts", 2) == 2


def test_a_batch_that_does_not_fit_after_a_resume_begins_again_at_the_step_of_the_resume(
    tmp_path: Path, callback: MakeCallback
) -> None:
    train(callback(), 4)
    saves = callback()
    resume_until_exhausted(saves, At(6, exhaust_once()))
    begun = [run.resumed_from for run in list_known_runs(tmp_path / "ckpts")]
    assert begun == [0, 4, 4]
    assert steps_on_disk(tmp_path / "ckpts") == [4, 6, 8]
    assert not saves._folder_of(4).exists()


def test_a_batch_that_does_not_fit_begins_nothing_where_what_was_resumed_is_gone(
    tmp_path: Path, callback: MakeCallback
) -> None:
    hugging_face(callback(), 4).train()
    reader = At(7, exhaust_once())
    reader._log_model = "checkpoint"  # as W&B's, so each save makes a folder
    with pytest.raises(ConfigError, match=r"checkpoint-4 was removed: start again"):
        resume_until_exhausted(callback(), reader)
    assert [run.resumed_from for run in list_known_runs(tmp_path / "ckpts")] == [0, 4]


class DrawsNumbers(GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drawn = random.random(), np.random.rand(), torch.rand(1, device="cpu")


def test_a_save_draws_no_random_numbers_of_the_training(callback: MakeCallback) -> None:
    def train(**given: Any) -> tuple[float, ...]:
        trainer = hugging_face(callback(), 4, model=DrawsNumbers(make_gpt2().config), **given)
        trainer.train()
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert train(save_strategy="steps") == train(save_strategy="no")


def exhaust_once() -> Callable[[Any], None]:
    exhausted = ["CUDA out of memory."]

    def exhaust(_: Any) -> None:
        if exhausted:
            raise RuntimeError(exhausted.pop())

    return exhaust


def resume_until_exhausted(saves: TrinitySyncCallback, exhausts: TrainerCallback) -> None:
    trainer = hugging_face(saves, 8, auto_find_batch_size=True)
    trainer.add_callback(exhausts)
    trainer.train(resume_from_checkpoint=saves.latest())


def test_two_callbacks_of_a_trainer_are_refused_before_training(callback: MakeCallback) -> None:
    first, second = (callback(name) for name in "ab")
    trainer = hugging_face(first)
    trainer.add_callback(second)
    with pytest.raises(ConfigError, match=r"this one has 2 \(/.*/a, /.*/b\)"):
        trainer.train()


def test_a_trainer_without_the_callback_loads_by_the_names_of_its_parameters(
    tmp_path: Path, callback: MakeCallback
) -> None:
    saves = callback()
    trainer = hugging_face(saves)
    trainer.remove_callback(saves)
    trainer.save_model(str(tmp_path / "saved"))
    trainer._load_from_checkpoint(resume_from_checkpoint=str(tmp_path / "saved"))
    trainer._load_optimizer_and_scheduler(checkpoint=None)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"save_only_model": True}, "save_only_model"),
        ({"push_to_hub": True}, "push_to_hub of checkpoints (set hub_strategy='end')"),
    ],
)
def test_what_is_not_saved_is_refused_before_training(
    callback: MakeCallback, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *a, **k: None)
    saves = callback()
    with pytest.raises(ConfigError, match=f"does not save with {re.escape(told)}; leave"):
        hugging_face(saves, **given)
    if "push_to_hub" in given:
        hugging_face(saves, **given, hub_strategy="end")


def test_fsdp_of_an_accelerate_that_knows_version_1_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(distributed_type=FSDP, fsdp_plugin=SimpleNamespace(kind=1))
    monkeypatch.setattr(huggingface_state, "AcceleratorState", lambda: state)
    arguments = SimpleNamespace(save_only_model=False, push_to_hub=False)
    found = list_unsupported(arguments, torch.nn.Linear(1, 1))
    assert found == ["FSDP1 (set fsdp_config={'version': 2})"]


# ------------------------------------------------------------ evaluations

SCORES = {2: 1.0, 4: 3.0, 6: 2.0, 8: 9.0, 10: 4.0, 12: 5.0}
"""What the evaluation at each step says."""


class Evaluated(TrainerCallback):
    """Scores each step by `SCORES`; keeps the weights of each save, which is then committed."""

    def __init__(self, saves: TrinitySyncCallback, trigger: CommitsHere) -> None:
        self.failed: list[str] = []
        self.saves, self.trigger = saves, trigger
        self.step = 0
        self.weights: dict[int, dict[str, Any]] = {}

    def score(self, _: Any) -> dict[str, Any]:
        return {"score": SCORES[self.step], "f1:macro": 0.5, "title": "no number"}

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.weights[state.global_step] = copied(dict(parts["model"].state_dict()))
        try:
            self.saves._get_saves().wait_all()
        except SaveFailedError as error:
            self.failed.append(str(error))
        self.trigger.finish()  # what is not kept is removed as well


def evaluated(
    callback: MakeCallback, *, stop: int = 99, trigger: CommitsHere | None = None, **arguments: Any
) -> tuple[Trainer, Evaluated, TrinitySyncCallback]:
    trigger = trigger or CommitsHere()
    saves = callback(trigger=trigger)
    seen = Evaluated(saves, trigger)
    trainer = hugging_face(
        saves,
        stop,
        **{
            "metric_for_best_model": "score",
            "eval_strategy": "steps",
            "eval_steps": 2,
            **arguments,
        },
    )
    trainer.add_callback(seen)
    trainer.compute_metrics = seen.score
    return trainer, seen, saves


def test_the_best_step_is_kept_and_loaded_at_the_end_also_after_a_resume(
    tmp_path: Path, callback: MakeCallback
) -> None:
    root = tmp_path / "ckpts"
    asked = {"load_best_model_at_end": True, "save_total_limit": 1}
    trainer, first, _ = evaluated(callback, stop=6, **asked)
    trainer.train()
    assert differences(dict(trainer.model.state_dict()), first.weights[4]) == []
    assert steps_on_disk(root) == [4, 6]

    trainer, second, saves = evaluated(callback, stop=7, **asked)
    trainer.train(resume_from_checkpoint=saves.latest())  # nothing is better than in the first run
    assert trainer.state.best_metric == SCORES[4]
    assert differences(dict(trainer.model.state_dict()), first.weights[4]) == []

    trainer, second, saves = evaluated(callback, **asked)
    trainer.train(resume_from_checkpoint=saves.latest())
    assert min(second.weights) == 8
    assert differences(dict(trainer.model.state_dict()), second.weights[8]) == []
    assert steps_on_disk(root) == [8, 12]


def test_the_best_step_is_kept_where_it_is_not_loaded_as_trainer_keeps_its_own(
    tmp_path: Path, callback: MakeCallback
) -> None:
    root = tmp_path / "ckpts"
    evaluated(callback, stop=6, save_total_limit=1)[0].train()
    assert steps_on_disk(root) == [4, 6]
    trainer, _, saves = evaluated(callback, save_total_limit=1)
    trainer.train(resume_from_checkpoint=saves.latest())
    assert steps_on_disk(root) == [8, 12]
    assert trainer.state.best_global_step == 8


LOADS_BEST = {"load_best_model_at_end": True, "save_total_limit": None}


def best_pins(root: Path) -> list[int]:
    return [each.step for each in list_pins(root) if each.reason == BEST]


def test_if_the_best_step_was_not_saved_the_best_before_it_is_loaded(
    tmp_path: Path, callback: MakeCallback, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, seen, _ = evaluated(callback, stop=10, trigger=Fails(8), **LOADS_BEST)
    trainer.train()
    assert "the disk is full" in seen.failed[0]
    assert differences(dict(trainer.model.state_dict()), seen.weights[4]) == []
    assert "best step 8 of" in caplog.text
    assert best_pins(tmp_path / "ckpts") == [4]


def test_a_best_checkpoint_that_trainer_itself_has_saved_is_loaded_by_it(
    tmp_path: Path, callback: MakeCallback
) -> None:
    trainer, first, saves = evaluated(callback, stop=4, **LOADS_BEST)
    trainer.remove_callback(saves)
    trainer.train()
    saves.on_train_end(None, None, None)

    trainer, second, _ = evaluated(callback, stop=7, **LOADS_BEST)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert sorted(second.weights) == steps_on_disk(tmp_path / "ckpts") == [6]
    assert differences(dict(trainer.model.state_dict()), first.weights[4]) == []
    assert best_pins(tmp_path / "ckpts") == []


@pytest.mark.parametrize("lasts", [False, True])
def test_a_pin_that_cannot_be_written_is_written_later_or_ends_the_training(
    tmp_path: Path,
    callback: MakeCallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lasts: bool,
) -> None:
    failures = iter(range(99 if lasts else 1))

    def fail(*arguments: Any) -> None:
        if next(failures, None) is not None:
            raise OSError(30, "read-only")
        pin_ahead(*arguments)

    monkeypatch.setattr(trainer_saves, "pin_ahead", fail)
    trainer, seen, saves = evaluated(callback, stop=8, **LOADS_BEST)
    if lasts:
        with pytest.raises(CommitError, match=r"repair .*/pins and resume"):
            trainer.train()
        assert sorted(seen.weights) == [2, 4]  # the next save was not of the best step
        saves.on_train_end(None, None, None)
    else:
        trainer.train()
        assert best_pins(tmp_path / "ckpts") == [8]
    assert "the best step 2 of" in caplog.text


def test_save_strategy_best_saves_what_is_better(tmp_path: Path, callback: MakeCallback) -> None:
    trainer, seen, _ = evaluated(callback, save_strategy="best", save_total_limit=None)
    trainer.train()
    assert sorted(seen.weights) == steps_on_disk(tmp_path / "ckpts") == [2, 4, 8]


def test_what_is_logged_at_a_step_decides_what_a_policy_keeps(
    tmp_path: Path, callback: MakeCallback, spool_folder: Path
) -> None:
    root = tmp_path / "ckpts"
    trainer, _, _ = evaluated(callback, save_total_limit=None)
    trainer.train()
    recorded = read_metrics(root, 1, 4)
    logged = next(
        each for each in trainer.state.log_history if each["step"] == 4 and "eval_loss" in each
    )
    assert recorded["eval_loss"] == logged["eval_loss"]
    assert (recorded["eval_score"], recorded["eval_f1_macro"]) == (SCORES[4], 0.5)
    assert "eval_title" not in recorded

    rules = Rules.of_job(read_job_settings(root), keep="best=2:eval_score:max", keep_weights="")
    prune(root, plan_prune(root, rules, time.time()), spool=spool_folder, recycle=False)
    assert steps_on_disk(root) == [8, 12]


# ------------------------------------------------------------ adapters


def test_an_adapter_is_saved_alone_resumed_bit_equal_and_read_by_peft(
    tmp_path: Path, callback: MakeCallback
) -> None:
    adapter = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    whole = train(callback("whole"), adapter=adapter)
    train(callback(), 10, adapter=adapter)
    saved = tmp_path / "ckpts/global_step_10/actor"
    weights = torch.load(next(saved.glob("model*")), weights_only=True)
    assert {name.split(".")[-2] for name in weights} == {"lora_A", "lora_B"}
    resumed = train(saves := callback(), adapter=adapter)
    assert resumed.state.global_step == 12
    assert differences(state_of(whole), state_of(resumed)) == []

    plain = hugging_face(callback("none"), stop=1).model  # the base of the same seed
    newest, trained = saves.latest(), dict(get_peft_model_state_dict(resumed.model))
    export_step(tmp_path / "ckpts", 12, to=tmp_path / "exported")
    for folder in (newest, tmp_path / "exported/lora_adapter"):
        read = PeftModel.from_pretrained(deepcopy(plain), folder)
        assert read.peft_config["default"].fan_in_fan_out
        assert differences(dict(get_peft_model_state_dict(read)), trained) == []


@pytest.mark.parametrize(("others", "is_frozen"), [(["ref"], True), (["b", "ref", "a"], False)])
def test_other_adapters_such_as_trls_are_saved_and_resumed_bit_equal(
    callback: MakeCallback, others: list[str], is_frozen: bool
) -> None:
    def make(stop: int, root: str = "ckpts", ref: float = 0.0, **arguments: Any) -> Any:
        saves = callback(root)
        torch.manual_seed(0)
        base = make_gpt2()
        config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model: Any = get_peft_model(base, config)
        for number, each in enumerate(others, 1):
            model.add_adapter(each, model.peft_config["default"])  # GRPOTrainer of TRL 1.16
            for name, parameter in [*model.named_parameters()]:
                if ".default." in name:
                    copy = model.get_parameter(name.replace(".default.", f".{each}."))
                    copy.data.copy_(parameter.data + ref * number)
                    copy.requires_grad_(not is_frozen)
        return saves, hugging_face(saves, stop, model=model, **arguments)

    _, whole = make(99, "whole", ref=0.25)
    whole.train()
    make(10, ref=0.25)[1].train()
    saves, resumed = make(99)  # whose adapters are others until it has loaded the step
    newest = Path(saves.latest())
    for name in others:
        names = {path.name for path in (newest / name).iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
    resumed.train(resume_from_checkpoint=str(newest))
    assert resumed.state.global_step == 12
    assert differences(state_of(whole), state_of(resumed)) == []
    read = PeftModel.from_pretrained(
        GPT2LMHeadModel(resumed.model.get_base_model().config), saves.latest()
    )
    for name in others:
        read.load_adapter(f"{saves.latest()}/{name}", name)
    for name in ("default", *others):
        trained = get_peft_model_state_dict(whole.model, adapter_name=name)
        assert differences(trained, get_peft_model_state_dict(read, adapter_name=name)) == []
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    greatest = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    saves, ended = make(99, "best", ref=0.25, **best, **greatest)
    ended.train()
    assert ended.state.best_global_step < 12
    step = saves.root / f"global_step_{ended.state.best_global_step}/actor"
    for name, saved in torch.load(next(step.glob("extra_state*"))).items():
        assert differences(saved, get_peft_model_state_dict(ended.model, adapter_name=name)) == []
    others.append("new")
    saves, lacking = make(99)
    with pytest.raises(ConfigError, match=r"holds .*default, .*ref, and this .*ref.*, new"):
        lacking.train(resume_from_checkpoint=saves.latest())


@pytest.mark.parametrize("other", ["lora_alpha", "width"])
def test_a_step_of_another_model_or_adapter_is_refused_before_anything_is_loaded(
    callback: MakeCallback, other: str
) -> None:
    def make(stop: int, alpha: int = 8, width: int = 16) -> Any:
        saves = callback()
        model = make_gpt2(n_embd=width)
        adapter = LoraConfig(r=2, lora_alpha=alpha, target_modules=["c_attn"])
        return saves, hugging_face(saves, stop, None if other == "width" else adapter, model=model)

    make(2)[1].train()
    changed = {"lora_alpha": {"alpha": 16}, "width": {"width": 32}}[other]
    saves, trainer = make(4, **changed)
    before = copied(dict(trainer.model.state_dict()))
    wanted = {"lora_alpha": "lora_alpha=8, and this model's has 16"}
    with pytest.raises(ConfigError, match=wanted.get(other, "holds another model: .*Nothing was")):
        trainer.train(resume_from_checkpoint=saves.latest())
    assert differences(before, dict(trainer.model.state_dict())) == []
    saves, trainer = make(4)
    trainer.train(resume_from_checkpoint=saves.latest())
    assert trainer.state.global_step == 4


def test_an_adapter_of_transformers_is_saved_alone_read_by_it_and_resumed_bit_equal(
    tmp_path: Path, callback: MakeCallback
) -> None:
    hugging_face(callback("none")).model.save_pretrained(tmp_path / "base")

    def adapted() -> Any:
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        return model

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    whole = train(callback("whole"), model=adapted())
    train(callback(), 10, model=adapted())
    resumed = train(saves := callback(), model=adapted())
    assert differences(state_of(whole), state_of(resumed)) == []
    newest = saves.latest()
    assert not (Path(newest) / "config.json").exists()
    read, tokens = GPT2LMHeadModel.from_pretrained(newest).eval(), TOKENS[:2]
    expected = resumed.model.eval()(tokens).logits
    assert torch.equal(read(tokens).logits, expected)
    greatest = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    ended = train(callback("best"), model=adapted(), **greatest, **best)
    assert ended.state.best_global_step < 12  # the loss falls, and its greatest is the best here
    assert not torch.equal(ended.model.eval()(tokens).logits, expected)


_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}


@pytest.mark.parametrize("how", ["add_adapter", "PeftModel", "as SAM", "P-tuning", "AdaLoRA"])
def test_what_of_an_adapted_model_would_be_lost_is_refused_by_name(
    callback: MakeCallback, how: str
) -> None:
    model: Any = make_gpt2()
    lora = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    if how == "add_adapter":
        model.add_adapter(LoraConfig(**lora))
    elif how == "P-tuning":
        model = get_peft_model(model, PromptEncoderConfig(**_PROMPT))
    elif how == "AdaLoRA":
        model = get_peft_model(model, AdaLoraConfig(init_r=4, target_r=2, total_step=9, **lora))
    else:
        if how == "as SAM":  # a module of that name, with the values of a tensor of the adapter
            model.prompt_encoder = torch.nn.Linear(2, 48, bias=False)
            torch.nn.init.zeros_(model.prompt_encoder.weight)
        model = get_peft_model(model, LoraConfig(**lora))
    if how in ("add_adapter", "PeftModel", "as SAM"):
        model.get_parameter([*dict(model.named_parameters())][-1]).requires_grad_(True)
    with pytest.raises(ConfigError, match="AdaLoRA" if how == "AdaLoRA" else "trained .* beside"):
        hugging_face(callback(), model=model)


def test_an_embedded_prompt_is_resumed_bit_equal(callback: MakeCallback) -> None:
    def train_prompt(root: str, stop: int = 99) -> dict[str, Any]:
        torch.manual_seed(0)
        model = make_gpt2(n_positions=10)
        adapter: Any = PromptTuningConfig(**_PROMPT)
        return copied(state_of(train(callback(root), stop, adapter=adapter, model=model)))

    whole = train_prompt("whole")
    train_prompt("ckpts", stop=10)
    assert differences(whole, train_prompt("ckpts")) == []


def test_a_model_of_other_tensors_than_its_class_is_saved_without_a_config(
    callback: MakeCallback, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_gpt2()
    weight_norm(model.transformer.h[0].mlp.c_fc, "weight")
    saves = callback()
    hugging_face(saves, 2, model=model).train()
    newest = saves.latest()
    assert not (Path(newest) / "config.json").exists()
    assert "the config of the model, which cannot be saved: transformer.h.0.mlp.c_fc" in caplog.text
    with pytest.raises(ValueError, match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(newest)
    hugging_face(saves, 4, model=model).train(resume_from_checkpoint=newest)


def test_the_hub_is_not_asked_about_the_base_model_at_a_save(
    tmp_path: Path, callback: MakeCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*arguments: Any, **named: Any) -> None:
        raise AssertionError("the Hub is asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", ask)
    monkeypatch.setattr("httpx.Client.send", ask)
    saves = callback()
    adapter = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    trainer = hugging_face(saves, 2, adapter)
    adapter.base_model_name_or_path = "nobody/not-in-the-cache"
    trainer.train()
    saved = next((tmp_path / "ckpts/global_step_2/actor").glob("model*"))
    assert any("wte" in name for name in torch.load(saved, weights_only=True))


@pytest.mark.parametrize("how", ["as they were", "resized", "trained", "targeted", "by tokens"])
def test_embeddings_that_are_not_the_base_models_are_saved_with_the_adapter(
    tmp_path: Path, how: str
) -> None:
    config = configure(LlamaConfig, 64, 16)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    if how == "resized":
        model.resize_token_embeddings(70)
    names = ["q_proj", *(["embed_tokens"] if how == "targeted" else [])]
    tokens = [3] if how == "by tokens" else None
    adapted = get_peft_model(
        model, LoraConfig(target_modules=names, trainable_token_indices=tokens)
    )
    if how == "trained":
        adapted.get_input_embeddings().requires_grad_(True)
    own = has_own_embeddings(adapted)
    assert own == (how in ("resized", "trained", "targeted"))
    saved = get_adapter_state(adapted, own)
    if how != "trained":  # of which PEFT would lose the embeddings
        assert differences(get_peft_model_state_dict(adapted), saved) == []
    assert any(name.endswith(("embed_tokens.weight", "base_layer.weight")) for name in saved) == own


class Unpicklable(torch.nn.Linear):
    """A module whose state cannot be staged."""

    def get_extra_state(self) -> Any:
        return lambda: 0

    def set_extra_state(self, state: Any) -> None:
        pass


def test_uploaded_weights_reach_a_reader_or_raise(
    callback: MakeCallback, spool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    saves = callback()
    model, read = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    saves.upload(7, model)
    with WeightReader(root=saves.root, name="test") as reader:
        assert reader.load_into(read) == 7
    assert differences(model.state_dict(), read.state_dict()) == []
    with pytest.raises(SaveFailedError, match="lambda"):
        saves.upload(8, Unpicklable(3, 2))
    saves.on_train_end(None, None, None)


class Trial(dict[str, Any]):
    """What a search gives to a training: optuna's has a number, and Ray's is a dict."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.params = number, self


def test_each_trial_of_a_hyperparameter_search_has_a_root_of_its_own(
    tmp_path: Path, callback: MakeCallback
) -> None:
    saves = callback()
    trainer = hugging_face(saves, stop=4)
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: {}
    trainer.hp_name = None
    for number in (0, 1):
        trainer.train(trial=Trial(number))
        assert saves.root == tmp_path / f"ckpts/run-{number}"
    assert [steps_on_disk(tmp_path / f"ckpts/run-{each}") for each in (0, 1)] == [[2, 4], [2, 4]]
    trainer.train()
    assert saves.root == tmp_path / "ckpts"
    assert steps_on_disk(saves.root) == [2, 4]
