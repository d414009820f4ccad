"""veRL's `fsdp_turbo`, whose saves the switch does not make, is refused by it."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def _start() -> str:
    import grpo_copy.cpu_platform  # noqa: F401, veRL on the CPU
    from verl.workers.engine.fsdp import FSDPTurboEngineWithLMHead

    import trinity_sync.integrations.verl.switch  # noqa: F401, the switch, as veRL imports it
    from trinity_sync import ConfigError

    engine = object.__new__(FSDPTurboEngineWithLMHead)  # the package of its modules is not needed
    try:
        engine._init_device_mesh()
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_the_engine_of_fsdp_turbo_is_refused() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert "fsdp_turbo is not saved by trinity_sync" in pool.submit(_start).result()
