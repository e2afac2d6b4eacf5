"""Sends requests to an engine's HTTP server."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp2x.rl.sync.targets.base import TargetError


class ControlError(RuntimeError):
    """The engine rejected a request, or did not answer. ``status`` is that of HTTP, or None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Turns an engine's rejection inside the block into a failure of this phase."""
    try:
        yield
    except ControlError as error:
        raise TargetError.at(name, str(error)) from error


def server_addresses(caller: str, address: str | Sequence[str], port: int) -> list[str]:
    """Returns the addresses of one or several servers. ``port`` is for the example in the error.

    Raises:
        ValueError: there is none, or one is not an HTTP address.
    """
    addresses = [address] if isinstance(address, str) else list(address)
    if not addresses or not all(isinstance(one, str) and one.startswith("http") for one in addresses):
        raise ValueError(f'{caller}: expected addresses such as "http://127.0.0.1:{port}", got {address!r}')
    return addresses


class Routes:
    """The routes of one server. It must answer within ``timeout_s``. ``missing`` says why it may lack a route."""

    def __init__(self, url: str, missing: str) -> None:
        self.name, self.timeout_s, self._missing = url.rstrip("/"), 300.0, missing
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # engines need no proxy

    def ask(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Calls ``send`` for a route that answers in JSON. Returns ``{}`` for an empty answer."""
        text = self.send(*args, **options)
        try:
            return json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise ControlError(f"{self.name} answers {args[1]} with {text[:200]!r}, which is not JSON") from error

    def send(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
        patient: bool = False,
    ) -> bytes:
        """Returns the answer. ``patient`` waits for it without a limit.

        Raises:
            ControlError: there is no answer, or its status is a failure.
        """
        url = f"{self.name}{path}" + (f"?{urllib.parse.urlencode(query, doseq=True)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=None if patient else self.timeout_s) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            if error.code == 404:
                said = f"it has no such route; {self._missing}"
            raise ControlError(f"{self.name} answers {path} with {error.code}: {said}", error.code) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error or type(error).__name__
            raise ControlError(f"{self.name} does not answer {path}: {reason}") from error
