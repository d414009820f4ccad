"""Bring a running vLLM engine to the newest version of a LoRA adapter; the base model stays.

::

    folder = WeightFolder("adapters", model="adapter")       # has adapter_config.json
    adapter = VLLMAdapter("http://127.0.0.1:8000")           # or an LLM
    name = adapter.load(folder.publish(reader))              # the model to request

Each version is an adapter of its own for vLLM. Loading a new version in place of the old one
(``load_inplace``) would keep the name, but vLLM 0.32 then reads the files again for every token.
Requests in flight end with the version that they began with, if ``max_loras`` is at least 2.

vLLM need not be installed for an engine behind a URL. Its server takes these calls with
``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
"""

import logging
import re
from pathlib import Path
from typing import Any

import xxhash

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.formats.folder_reader import verify_version
from trinity_sync.formats.published import PublishedVersion

logger = logging.getLogger(__name__)

KEPT = 2
"""Versions that a server offers: a client may just have been told the name of the one before."""


class VLLMAdapter:
    """Loads the versions of one adapter into one engine. One thread uses it.

    Args:
        engine: URL of a vLLM server, or an ``LLM`` of this process; started with ``enable_lora``.
        name: name of the adapter; that of a version is ``name-3``.
        api_key: the key of the server, if it has one.
        timeout_s: seconds for an answer of the server.

    Raises:
        ConfigError: ``engine`` is neither a URL nor an ``LLM``.
    """

    def __init__(
        self,
        engine: Any,
        name: str = "policy",
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not isinstance(engine, str) and not hasattr(engine, "llm_engine"):
            raise ConfigError(
                f"{engine!r} takes no adapters; pass a vLLM LLM, or the URL of a server"
            )
        self._engine, self._name, self._timeout_s = engine, name, timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def load(self, version: PublishedVersion) -> Any:
        """Load a version of the adapter, after comparing its checksum.

        Args:
            version: what `WeightFolder.publish` or `WeightFolder.latest` returned.

        Returns:
            For an ``LLM``, the ``LoRARequest`` to generate with; for a server, the name of the
            model to request. Loading a version again is harmless.

        Raises:
            WeightSyncError: the version is torn or altered, or the engine did not load it. It
                serves what it had.
        """
        verify_version(version)
        name = f"{self._name}-{version.version}"
        if isinstance(self._engine, str):
            loaded: Any = self._load_on_server(name, version)
        else:
            loaded = self._load_in_process(name, version)
        logger.info("the engine has step %d of the adapter as %s", version.step, name)
        return loaded

    def _load_in_process(self, name: str, version: PublishedVersion) -> Any:
        from vllm.lora.request import LoRARequest

        path = str(version.folder)
        # unique also among other adapters of the engine
        request = LoRARequest(name, xxhash.xxh32_intdigest(path.encode()) % (2**31 - 1) + 1, path)
        try:
            self._engine.llm_engine.add_lora(request)
        except Exception as error:
            raise WeightSyncError(f"vLLM did not load {version.folder}: {error}") from error
        return request

    def _load_on_server(self, name: str, version: PublishedVersion) -> str:
        models = self._call("GET", "/v1/models")["data"]
        offered = {each["id"]: Path(each["root"]) for each in models if each.get("parent")}
        pattern = re.compile(re.escape(self._name) + r"-(\d+)")
        ours = {int(match[1]): each for each in offered if (match := pattern.fullmatch(each))}
        stale = [each for each in ours.values() if offered[each].parent != version.folder.parent]
        older = sorted(n for n, each in ours.items() if each not in stale and each != name)
        for each in [*stale, *(ours[number] for number in older[: 1 - KEPT])]:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": each})
        if name not in offered or name in stale:
            order = {"lora_name": name, "lora_path": str(version.folder)}
            self._call("POST", "/v1/load_lora_adapter", order)
        return name

    def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> Any:
        import httpx

        url = self._engine.rstrip("/") + path
        try:
            answer = httpx.request(
                method,
                url,
                json=body,
                headers=self._headers,
                timeout=self._timeout_s,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise WeightSyncError(
                f"{url} did not answer: {error!r}; does the vLLM server run?"
            ) from error
        if answer.is_error:
            hint = ""
            if answer.status_code == 404:
                hint = (
                    "; start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
            raise WeightSyncError(
                f"{url} answered {answer.status_code}: {answer.text[:2000]}{hint}"
            )
        return answer.json() if method == "GET" else None
