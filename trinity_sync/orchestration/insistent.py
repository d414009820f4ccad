"""Ask a busy server again at once.

A Prefect server on SQLite answers 503 when two writes meet, and is free again milliseconds later;
Prefect's client waits two seconds before it asks again.
"""

import time

import httpx

WAITS_S = (0.01, 0.02, 0.05, 0.1, 0.2)


class InsistentTransport(httpx.HTTPTransport):
    """Repeats requests that were answered with 503, unless the server says when to come back."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, several times within half a second if need be."""
        for wait_s in WAITS_S:
            response = super().handle_request(request)
            if response.status_code != 503 or "retry-after" in response.headers:
                return response
            response.close()
            time.sleep(wait_s)
        return super().handle_request(request)
