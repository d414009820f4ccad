"""Calls of a vLLM server over HTTP, whose errors say what to do."""

from typing import Any

from trinity_sync.errors import WeightSyncError


class RefusedError(WeightSyncError):
    """The engine has answered that it did not do what it was asked for."""


class ServerApi:
    """A vLLM server, which is allowed ``timeout_s`` for an answer.

    ``options`` are what it has to be started with to have the calls, for the error message.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float, *, options: str) -> None:
        import httpx

        self._url, self._options = url.rstrip("/"), options
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # uvicorn closes one after an error
        )

    def call(self, method: str, path: str, **request: Any) -> Any:
        """Make one call; return the JSON that a GET answers, None for other methods.

        The path begins with ``/``; ``request`` is ``json`` or ``params``, as for httpx.

        Raises:
            RefusedError: the server answers with an error.
            WeightSyncError: it does not answer.
        """
        import httpx

        try:
            answer = self._client.request(method, self._url + path, **request)
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            missing = error.response.status_code == 404
            hint = f"; start the server with {self._options}" if missing else ""
            raise RefusedError(
                f"{self._url}{path} answered {error.response.status_code}: "
                f"{error.response.text[:2000]}{hint}"
            ) from error
        except httpx.HTTPError as error:
            raise WeightSyncError(
                f"{self._url} did not answer {path}: {error!r}; does the vLLM server run?"
            ) from error
        if method != "GET":
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise WeightSyncError(f"{self._url}{path} answered no JSON; is it vLLM's?") from error
