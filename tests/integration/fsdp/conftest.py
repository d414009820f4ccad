import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# the CPU platform for veRL, the tiny model and its engine are those of the example
sys.path.insert(0, str(Path(__file__).parents[3] / "examples/demo"))


@pytest.fixture(scope="package", autouse=True)
def verl_on_cpu() -> Iterator[None]:
    from grpo_copy.cpu_platform import use_cpu

    use_cpu()
    from verl.utils import fsdp_utils

    with pytest.MonkeyPatch.context() as patch:
        # once Lightning is imported, each module is an ABC, and how veRL has FSDP2 wrap one of
        # those is refused by Python 3.11
        patch.setattr(fsdp_utils, "fully_shard_module", None)
        yield
    del os.environ["VERL_PLATFORM"]  # processes of other tests do not have this platform


@pytest.fixture(scope="package")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("one-rank") / "rendezvous"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the jobs of a module's tests."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2."""
    from grpo_copy import model

    return model.create_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128)


@pytest.fixture(scope="module")
def policy(one_rank: None, tiny: Path) -> Any:
    """The example's, with veRL's engine."""
    from grpo_copy.policy import Policy

    return Policy(tiny)
