"""veRL's `fsdp_turbo`, whose saves the switch does not make, is refused by it."""

from pathlib import Path

import pytest

from tests.integration.fsdp.ranks import on_ranks


def _start() -> None:
    from verl.workers.engine.fsdp import FSDPTurboEngineWithLMHead

    import trinity_sync.integrations.verl.switch  # noqa: F401, the switch, as veRL imports it
    from trinity_sync import ConfigError

    engine = object.__new__(FSDPTurboEngineWithLMHead)  # the package of its modules is not needed
    with pytest.raises(ConfigError, match="fsdp_turbo is not saved by trinity_sync"):
        engine._init_device_mesh()


def test_the_engine_of_fsdp_turbo_is_refused(tmp_path: Path) -> None:
    on_ranks(_start, scratch=tmp_path, world_size=1)
