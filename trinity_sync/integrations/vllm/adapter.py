"""Bring a running vLLM engine to the newest version of a LoRA adapter; the base model stays.

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

from trinity_sync import PublishedVersion
from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.integrations.vllm.server_api import ServerApi
from trinity_sync.weights.folder.published import JOB_LOCK, read_latest
from trinity_sync.weights.folder.reader import verify_version

logger = logging.getLogger(__name__)

OPTIONS = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
KEPT = 2
"""Versions that a server offers: a client may just have been told the name of the one before."""


class VLLMAdapter:
    """Loads the versions of one adapter into one engine. One thread uses it.

    Args:
        engine: URL of a vLLM server, or an ``LLM`` of this process; started with ``enable_lora``.
        name: name of the adapter; that of a version has its number and the start of its checksum,
            ``name-3-5f1c09ab``, since numbers begin at 1 again in a folder that was emptied.
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
        self._server: ServerApi | None = None
        if isinstance(engine, str):
            self._server = ServerApi(engine, api_key, timeout_s, options=OPTIONS)
        elif not hasattr(engine, "llm_engine"):
            raise ConfigError(
                f"{engine!r} takes no adapters; pass a vLLM LLM, or the URL of a server"
            )
        self._engine, self._name = engine, name

    def load(self, version: PublishedVersion) -> Any:
        """Load a version of the adapter, after comparing its checksum.

        Args:
            version: what `WeightFolder.publish` or `WeightFolder.latest` returned.

        Returns:
            For an ``LLM``, the ``LoRARequest`` to generate with; for a server, the name of the
            model to request. Loading a version again is harmless.

        Raises:
            WeightSyncError: the version is torn or altered, the engine did not load it, or the
                name is another job's, whose publisher lives. It serves what it had.
        """
        verify_version(version)
        name = f"{self._name}-{version.version}-{version.checksum[:8]}"
        if self._server:
            loaded: Any = self._load_on_server(self._server, name, version)
        else:
            loaded = self._load_in_process(name, version)
        logger.info("the engine has step %d of the adapter as %s", version.step, name)
        return loaded

    def _load_in_process(self, name: str, version: PublishedVersion) -> Any:
        from vllm.lora.request import LoRARequest

        path = str(version.folder)
        # unique also among other adapters of the engine
        digest = xxhash.xxh32_intdigest(f"{path} {version.checksum}".encode())
        request = LoRARequest(name, digest % (2**31 - 1) + 1, path)
        try:
            self._engine.llm_engine.add_lora(request)
        except Exception as error:
            raise WeightSyncError(f"vLLM did not load {version.folder}: {error}") from error
        return request

    def _load_on_server(self, server: ServerApi, name: str, version: PublishedVersion) -> str:
        models = server.call("GET", "/v1/models")["data"]
        pattern = re.compile(re.escape(self._name) + r"-\d+-[0-9a-f]{8}")
        ours = {  # in the order in which they were loaded
            each["id"]: Path(each["root"])
            for each in models
            if each.get("parent") and pattern.fullmatch(each["id"])
        }
        valid = [  # their folders have what was loaded, as far as one can tell
            each
            for each, path in ours.items()
            if path.parent == version.folder.parent and (path == version.folder) == (each == name)
        ]
        before = [each for each in valid if each != name][1 - KEPT :]
        stay = {name, *before}.intersection(valid)
        for folder in {path.parent for path in ours.values()} - {version.folder.parent}:
            latest = read_latest(folder)
            if latest and latest.is_of_other_root(version):
                with try_acquire_file_lock(folder / JOB_LOCK) as is_free:
                    if not is_free:
                        raise WeightSyncError(
                            f"the adapter {self._name} of this server is that of the job in "
                            f"{latest.root}, published into {folder}; pass another name"
                        )
        for each in ours:
            if each not in stay:
                server.call("POST", "/v1/unload_lora_adapter", json={"lora_name": each})
        if name not in stay:
            order = {"lora_name": name, "lora_path": str(version.folder)}
            server.call("POST", "/v1/load_lora_adapter", json=order)
        return name
