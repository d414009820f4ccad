from tests.integration.fsdp.conftest import verl_on_cpu  # noqa: F401, and the path of its platform
