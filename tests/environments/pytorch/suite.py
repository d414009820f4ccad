"""Which of PyTorch's tests of DCP have to pass, and why others are left out.

The tests are those of torch 2.13. A test that has a parameter is named with its value.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path("test/distributed/checkpoint")
"""Folder of the tests in PyTorch's repository."""

THREADS = "runs as with thread_count=1: the number of threads is an option of FileSystemWriter"
EXTENSION = "tests stream extensions, an option of FileSystemWriter"
PROCESS = "AsyncCheckpointerType.PROCESS, which StepWriter refuses by name"
NO_STORAGE = "neither saves nor loads"
OTHERS = "saves or loads with a storage of PyTorch or of the test only"
GPU = "each rank needs a GPU"

E2E = "test_e2e_async_cached_cache_staged_state_dict"
LEFT_OUT: dict[str, dict[str, str]] = {
    "e2e/test_e2e_save_and_load.py": {
        f"TestE2ESaveAndLoad::{E2E}_False_async_checkpointer_type2_zoc_False": PROCESS,
        f"TestE2ESaveAndLoad::{E2E}_True_async_checkpointer_type3_zoc_False": PROCESS,
        f"TestE2ESaveAndLoad::{E2E}_False_async_checkpointer_type4_zoc_True": PROCESS,
        f"TestE2ESaveAndLoad::{E2E}_False_async_checkpointer_type5_zoc_True": "makes a "
        "DefaultStager with non-blocking copies, which needs a GPU",
        "TestE2ESaveAndLoad::test_overwrite": "its overwrite=False is an option of "
        "FileSystemWriter, which has one checkpoint in a folder; a job has one in each step",
        "TestNoCPU::test_no_cpu": f"NCCL: {GPU}",
    },
    "test_compatibility.py": {
        "TestDCPCompatbility::test_metadata": NO_STORAGE,
        "TestDCPCompatbility::test_storage_meta": "compares with the save_id of FileSystemWriter; "
        "the index of a step has no id, it is the same in each save of a structure",
    },
    "test_dtensor_resharding.py": {
        f"TestDTensorReshardPlacementChange::test_1d_to_1d_reshard_placement_change_{name}": (
            EXTENSION
        )
        for name in ("extensions1", "extensions2")
    },
    "test_file_system_checkpoint_cpu.py": {
        f"{name}_thread_count_2": THREADS
        for name in (
            "TestDistributedReshardOnLoad::test_load_rowwise_to_colwise",
            "TestDistributedReshardOnLoad::test_load_with_different_shard_plan",
            "TestDistributedReshardOnLoad::test_save_load_bytes",
            "TestDistributedReshardOnLoad::test_switch_between_sharded_tensor_to_tensor",
            "TestDistributedStateDictSaveLoad::test_read_write_only_tensor",
            "TestDistributedStateDictSaveLoadWithSharedTensor::test_read_write_shard_tensor",
        )
    }
    | {
        f"TestDistributedStateDictSaveLoad{name}_thread_count_{number}": EXTENSION
        for number in (1, 2)
        for name in (
            "Rot13::test_read_write_tensor_and_blob",
            "ZStandard::test_read_write_only_tensor",
        )
    },
    "test_format_utils.py": {"TestFormatUtils::test_online_torch_save_to_dcp": OTHERS},
    "test_planner.py": {
        name: NO_STORAGE
        for name in (
            "TestPlannerHelpers::test_compare_save_plans",
            "TestPlannerHelpers::test_create_read_item_from_chunks",
            "TestPlannerHelpers::test_merge_delta_local_plans",
            "TestSavePlan::test_dedup_plans",
            "TestSavePlan::test_finish_plan_with_caching",
            "TestSavePlan::test_global_plan",
            "TestSavePlan::test_global_plan_with_caching",
            "TestSavePlan::test_load_with_resharding",
            "TestSavePlan::test_load_with_world_size_diff_by_one",
            "TestSavePlan::test_local_load_plan",
            "TestSavePlan::test_local_plan",
            "TestSavePlan::test_local_plan_with_caching",
            "TestValidateGlobalPlan::test_detect_overlapping_chunks",
            "TestValidateGlobalPlan::test_non_overlapping_chunks",
        )
    },
    "test_save_load_api.py": {
        "TestSaveAndLoadAPI::test_assert_same_keys": NO_STORAGE,
        "TestSaveAndLoadAPI::test_auto_detect": "tests which of PyTorch's storages DCP chooses for "
        "a checkpoint id; it cannot choose a StepWriter, which needs a coordinator",
    },
}
"""Reasons by file and test."""

PASSES: dict[str, int] = {
    "e2e/test_e2e_save_and_load.py": 13,
    "test_compatibility.py": 2,
    "test_dtensor_checkpoint.py": 1,
    "test_dtensor_resharding.py": 8,
    "test_file_system_checkpoint_cpu.py": 6,
    "test_format_utils.py": 2,
    "test_fsdp_optim_state.py": 2,
    "test_fsdp_tp_checkpoint_conversion.py": 1,
    "test_hsdp_checkpoint.py": 4,
    "test_planner.py": 3,
    "test_tp_checkpoint.py": 2,
}
"""How many tests have to pass, by file."""
FILES = (*sorted({*PASSES, *LEFT_OUT}),)

LEFT_OUT_FILES: dict[str, str] = {
    OTHERS: """
        _experimental/test_barriers.py _experimental/test_builder.py
        _experimental/test_checkpoint_process.py _experimental/test_checkpoint_reader.py
        _experimental/test_checkpoint_writer.py _experimental/test_checkpointer.py
        _experimental/test_staging.py _experimental/test_types.py test_checkpoint.py
        test_consolidate_hf_safetensors.py test_fsspec.py test_hf_safetensor_e2e.py
        test_hf_storage.py test_pg_transport.py test_quantized_hf_storage.py
        test_state_dict_stager.py
    """,
    GPU: """
        e2e/test_fine_tuning.py fsdp/test_fsdp_dsd.py test_file_system_checkpoint.py
        test_fsdp_model_state.py
    """,
    NO_STORAGE: """
        e2e/test_fsdp_ep.py test_dedup_tensors.py test_nested_dict.py test_state_dict.py
        test_state_dict_utils.py test_traverse.py test_utils.py
    """,
    PROCESS: "test_async_process_executor.py",
}
"""Files by reason; `GPU` also stands for tests that pass the rank as a tensor's device."""


class Report:
    """A pytest plugin that leaves tests out, and fails the session for an unexpected outcome."""

    def __init__(self) -> None:
        self._left_out: list[str] = []
        self._outcomes: dict[str, str] = {}
        self._files: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any], config: pytest.Config) -> None:
        """Deselect the tests that are left out."""
        kept, left_out = [], []
        for item in items:
            file, test = _split(item.nodeid)
            self._files.add(file)
            if reason := LEFT_OUT.get(file, {}).get(test):
                self._left_out.append(reason)
            (left_out if reason else kept).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test, the first that is not ``passed``."""
        name = "::".join(_split(report.nodeid))
        if self._outcomes.get(name, "passed") == "passed":
            self._outcomes[name] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session unless as many tests as have to pass have passed, and no other ran."""
        if self._list_problems() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many passed, were left out and why, and what was unexpected."""
        passed = list(self._outcomes.values()).count("passed")
        terminalreporter.section("PyTorch's tests on trinity_sync")
        terminalreporter.line(f"{passed} passed, {len(self._left_out)} left out:")
        for reason in dict.fromkeys(self._left_out):
            terminalreporter.line(f"  {self._left_out.count(reason):3d}  {reason}")
        for problem in self._list_problems():
            terminalreporter.line(problem, red=True)

    def _list_problems(self) -> list[str]:
        bad = [f"{how}: {name}" for name, how in sorted(self._outcomes.items()) if how != "passed"]
        ran = Counter(name.partition("::")[0] for name in self._outcomes)
        return bad + [
            f"{ran[file]} tests of {file} ran, and {PASSES.get(file, 0)} have to pass"
            for file in sorted(self._files)
            if ran[file] != PASSES.get(file, 0)
        ]


def _split(node: str) -> tuple[str, str]:
    """Return the file of a test, below `FOLDER`, and its name."""
    path, _, test = node.partition("::")
    return path.rpartition("distributed/checkpoint/")[2], test
