"""Which of PyTorch's tests of DCP have to pass, and why others are left out.

The tests are those of torch 2.13. A test that has a parameter is named with its value.
"""

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

PASSES: dict[str, tuple[str, ...]] = {
    "e2e/test_e2e_save_and_load.py": (
        "TestE2ESaveAndLoad::test_different_ordered_state_dict_keys",
        f"TestE2ESaveAndLoad::{E2E}_False_async_checkpointer_type0_zoc_False",
        f"TestE2ESaveAndLoad::{E2E}_True_async_checkpointer_type1_zoc_False",
        "TestE2ESaveAndLoad::test_e2e_compile_False_model_type0",
        "TestE2ESaveAndLoad::test_e2e_compile_False_model_type1",
        "TestE2ESaveAndLoad::test_e2e_compile_False_model_type2",
        "TestE2ESaveAndLoad::test_e2e_compile_True_model_type0",
        "TestE2ESaveAndLoad::test_e2e_compile_True_model_type1",
        "TestE2ESaveAndLoad::test_e2e_compile_True_model_type2",
        "TestE2ESaveAndLoad::test_no_dist",
        "TestE2ESaveAndLoad::test_partial_load",
        "TestE2ESaveAndLoad::test_stateful_and_non_stateful_loads",
        "TestInitStateDict::test_init_state_dict",
    ),
    "test_compatibility.py": (
        "TestDCPCompatbility::test_sharded_tensor_dependency",
        "TestDCPCompatbility::test_with_v_2_3",
    ),
    "test_dtensor_checkpoint.py": ("DTensorPlanner::test_distributed_tensor_planner",),
    "test_dtensor_resharding.py": (
        "TestCheckpointableReshard::test_uneven_reshard_with_checkpointable_api",
        "TestCheckpointableReshard::test_uneven_reshard_with_dtensor_shards_wrapper_api",
        "TestDTensorReshardMeshChange::test_1d_to_2d_reshard_mesh_change",
        "TestDTensorReshardMeshChange::test_2d_to_1d_reshard_mesh_change",
        "TestDTensorReshardMeshChange::test_dtensor_checkpoint_resharding_with_empty_shard",
        "TestDTensorReshardMeshChange::test_dtensor_checkpoint_with_uneven_shards",
        "TestDTensorReshardPlacementChange::test_1d_to_1d_reshard_placement_change_extensions0",
        "TestDTensorReshardPlacementChange::test_2d_to_2d_reshard_placement_change",
    ),
    "test_file_system_checkpoint_cpu.py": (
        "TestDistributedReshardOnLoad::test_load_rowwise_to_colwise_thread_count_1",
        "TestDistributedReshardOnLoad::test_load_with_different_shard_plan_thread_count_1",
        "TestDistributedReshardOnLoad::test_save_load_bytes_thread_count_1",
        "TestDistributedReshardOnLoad::test_switch_between_sharded_tensor_to_tensor_thread_count_1",
        "TestDistributedStateDictSaveLoad::test_read_write_only_tensor_thread_count_1",
        "TestDistributedStateDictSaveLoadWithSharedTensor::"
        "test_read_write_shard_tensor_thread_count_1",
    ),
    "test_format_utils.py": (
        "TestFormatUtils::test_dcp_to_torch_save",
        "TestFormatUtils::test_torch_save_to_dcp",
    ),
    "test_fsdp_optim_state.py": (
        "FsdpOptimStateCheckpoint::test_load_sharded_optimizer_state_dict_pass_planner_False",
        "FsdpOptimStateCheckpoint::test_load_sharded_optimizer_state_dict_pass_planner_True",
    ),
    "test_fsdp_tp_checkpoint_conversion.py": ("TestFsdpTpCheckpointConversion::test_fsdp_to_tp",),
    "test_hsdp_checkpoint.py": (
        "TestHSDPCheckpoint::test_hsdp_checkpoint_is_even_sharded_model_False",
        "TestHSDPCheckpoint::test_hsdp_checkpoint_is_even_sharded_model_True",
        "TestHSDPCheckpoint::test_hsdp_fsdp_checkpoint_conversion_is_even_sharded_model_False",
        "TestHSDPCheckpoint::test_hsdp_fsdp_checkpoint_conversion_is_even_sharded_model_True",
    ),
    "test_planner.py": (
        "TestLoadPlanner::test_load_different_sizes_throws",
        "TestLoadPlanner::test_strict",
        "TestLoadPlanner::test_version_key_in_planner_data",
    ),
    "test_tp_checkpoint.py": (
        "TestTpCheckpoint::test_tp_checkpoint",
        "TestTpCheckpoint::test_tp_checkpoint_load_on_meta_device",
    ),
}
"""Tests that have to pass, by file."""

FILES = (*sorted({*PASSES, *LEFT_OUT}),)

LEFT_OUT_FILES: dict[str, str] = {
    "_experimental/test_barriers.py": OTHERS,
    "_experimental/test_builder.py": OTHERS,
    "_experimental/test_checkpoint_process.py": OTHERS,
    "_experimental/test_checkpoint_reader.py": OTHERS,
    "_experimental/test_checkpoint_writer.py": OTHERS,
    "_experimental/test_checkpointer.py": OTHERS,
    "_experimental/test_staging.py": OTHERS,
    "_experimental/test_types.py": OTHERS,
    "e2e/test_fine_tuning.py": GPU,
    "e2e/test_fsdp_ep.py": NO_STORAGE,
    "fsdp/test_fsdp_dsd.py": GPU,
    "test_async_process_executor.py": PROCESS,
    "test_checkpoint.py": OTHERS,
    "test_consolidate_hf_safetensors.py": OTHERS,
    "test_dedup_tensors.py": NO_STORAGE,
    "test_file_system_checkpoint.py": GPU,
    "test_fsdp_model_state.py": GPU,
    "test_fsspec.py": OTHERS,
    "test_hf_safetensor_e2e.py": OTHERS,
    "test_hf_storage.py": OTHERS,
    "test_nested_dict.py": NO_STORAGE,
    "test_pg_transport.py": OTHERS,
    "test_quantized_hf_storage.py": OTHERS,
    "test_state_dict.py": NO_STORAGE,
    "test_state_dict_stager.py": OTHERS,
    "test_state_dict_utils.py": NO_STORAGE,
    "test_traverse.py": NO_STORAGE,
    "test_utils.py": NO_STORAGE,
}
"""Reasons by file; `GPU` also stands for tests that pass the rank as a tensor's device."""


class Report:
    """A pytest plugin that leaves tests out, and fails the session for an unexpected outcome."""

    def __init__(self) -> None:
        self._unlisted: set[str] = set()
        self._left_out: list[str] = []
        self._outcomes: dict[str, str] = {}
        self._expected: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any], config: pytest.Config) -> None:
        """Deselect the tests that are left out."""
        files = {_split(item.nodeid)[0] for item in items}
        self._expected = {f"{file}::{test}" for file in files for test in PASSES.get(file, ())}
        kept, left_out = [], []
        for item in items:
            file, test = _split(item.nodeid)
            (left_out if test in LEFT_OUT.get(file, {}) else kept).append(item)
        self._unlisted = {"::".join(_split(item.nodeid)) for item in kept} - self._expected
        self._left_out = [LEFT_OUT[file][test] for file, test in map(_split_item, left_out)]
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test, the first that is not ``passed``."""
        name = "::".join(_split(report.nodeid))
        if self._outcomes.get(name, "passed") == "passed":
            self._outcomes[name] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session unless exactly the listed tests have passed."""
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
        bad = {name: self._outcomes.get(name, "not found") for name in self._expected}
        return [
            f"not listed in tests/environments/pytorch/suite.py: {name}"
            for name in sorted(self._unlisted)
        ] + [f"{outcome}: {name}" for name, outcome in sorted(bad.items()) if outcome != "passed"]


def _split(node: str) -> tuple[str, str]:
    """Return the file of a test, below `FOLDER`, and its name."""
    path, _, test = node.partition("::")
    return path.rpartition("distributed/checkpoint/")[2], test


def _split_item(item: Any) -> tuple[str, str]:
    return _split(item.nodeid)
