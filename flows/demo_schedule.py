"""The schedule of federated rounds, paused and resumed over Prefect's API (its client costs a second of a core)."""

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import httpx

from infra.errors import CollmError

FLOW = "federated-round"
TRIES = 5


class ScheduleFailed(CollmError):
    """Prefect did not do what it was asked."""


class RoundSchedule:
    """Every deployment of the round's flow. Async context manager."""

    def __init__(
        self, api_url: str, *, transport: httpx.AsyncBaseTransport | None = None, retry_s: float = 1.0
    ) -> None:
        """``api_url`` ends in ``/api``; ``transport`` replaces the network in tests."""
        self._http = httpx.AsyncClient(
            base_url=api_url.rstrip("/") + "/", timeout=10.0, transport=transport, trust_env=False
        )
        self._retry_s = retry_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the worker has made a deployment. Raises ``ScheduleFailed``."""
        begun_s = time.monotonic()
        while True:
            if await self._found():
                return
            if time.monotonic() - begun_s > timeout_s:
                raise ScheduleFailed(f"no deployment of the flow {FLOW} after {timeout_s:g} s")
            await asyncio.sleep(self._retry_s)

    async def pause(self) -> None:
        """Schedule no more rounds; one that runs goes on."""
        for deployment in await self.deployments():
            await self._post(f"deployments/{deployment}/pause_deployment")

    async def resume(self) -> None:
        """Schedule rounds again, the first one now: the next tick of the interval may be most of a window away."""
        for deployment in await self.deployments():
            await self._post(f"deployments/{deployment}/resume_deployment")
            await self._post(f"deployments/{deployment}/create_flow_run", {})

    async def set_tokens(self, tokens: int) -> None:
        """Have every round from now on ask its clients for that many tokens."""
        await self.deployments()
        for deployment, parameters in (await self._found()).items():
            await self._ask("PATCH", f"deployments/{deployment}", {"parameters": {**parameters, "tokens": tokens}})

    async def deployments(self) -> list[str]:
        """Return the ids of the flow's deployments. Raises ``ScheduleFailed`` if there is none."""
        ids = list(await self._found())
        if not ids:
            raise ScheduleFailed(f"Prefect knows no deployment of the flow {FLOW}")
        return ids

    async def _found(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each deployment, by id."""
        found = await self._post("deployments/filter", {"flows": {"name": {"any_": [FLOW]}}})
        return {str(item["id"]): item.get("parameters") or {} for item in found} if isinstance(found, list) else {}

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """Return the answer's JSON; what is asked here may be repeated, so a Prefect that is busy is asked again."""
        last = ""
        for _ in range(TRIES):
            try:
                answer = await self._http.request(method, path, json=body)
            except httpx.TransportError as e:
                last = repr(e)
            else:
                if answer.is_success:
                    return answer.json() if answer.content else None
                last = f"{answer.status_code} {answer.text[:200]}"
                if answer.status_code < 500:
                    break
            await asyncio.sleep(self._retry_s)
        raise ScheduleFailed(f"Prefect, {path}: {last}")
