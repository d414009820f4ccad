"""Calls of a vLLM server over HTTP, whose errors say what to do."""

from typing import Any

from trinity_sync.errors import WeightSyncError


class ServerApi:
    """A vLLM server.

    Args:
        url: its URL.
        api_key: its key, if it has one.
        timeout_s: seconds for an answer.
        options: what the server has to be started with to have the calls, for the error message.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float, *, options: str) -> None:
        import httpx

        self._url, self._options = url.rstrip("/"), options
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=timeout_s, trust_env=False)

    def call(self, method: str, path: str, **request: Any) -> Any:
        """Make one call.

        Args:
            method: of HTTP.
            path: of the call, from ``/`` on.
            request: ``json`` or ``params``, as for httpx.

        Returns:
            What a GET answers; None for others, whose answers are not always JSON.

        Raises:
            WeightSyncError: the server does not answer, or answers with an error.
        """
        import httpx

        try:
            answer = self._client.request(method, self._url + path, **request)
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            missing = error.response.status_code == 404
            hint = f"; start the server with {self._options}" if missing else ""
            raise WeightSyncError(
                f"{self._url}{path} answered {error.response.status_code}: "
                f"{error.response.text[:2000]}{hint}"
            ) from error
        except httpx.HTTPError as error:
            raise WeightSyncError(
                f"{self._url} did not answer {path}: {error!r}; does the vLLM server run?"
            ) from error
        return answer.json() if method == "GET" else None
