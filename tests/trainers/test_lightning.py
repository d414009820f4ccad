"""The callback for Lightning's Trainer: saved by steps, resumed bit-equal, failures raised.

Lightning runs in processes of its own here. Once it is imported, every ``nn.Module`` passes for an
``abc.ABC`` (``lightning.fabric.utilities.apply_func`` has an ABC whose ``__subclasshook__`` accepts
what has ``to``), and veRL 0.9 then wraps models for FSDP2 in a way that Python refuses (``object
layout differs``), which the tests of FSDP in this process would meet.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path


def _run(training: str, tmp_path: Path, spool: Path) -> None:
    from tests.trainers import lightning_training

    getattr(lightning_training, training)(tmp_path, spool)


def run_in_own_process(training: str, tmp_path: Path, spool: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(_run, training, tmp_path, spool).result()


def test_a_lightning_trainer_resumes_bit_equal_in_mid_epoch(
    tmp_path: Path, spool_folder: Path
) -> None:
    run_in_own_process("resume_bit_equal_in_mid_epoch", tmp_path, spool_folder)


def test_a_lightning_training_ends_with_the_failure_of_a_save(
    tmp_path: Path, spool_folder: Path
) -> None:
    run_in_own_process("end_with_the_failure_of_a_save", tmp_path, spool_folder)
