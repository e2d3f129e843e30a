"""An agent that leaves its history to the Responses API, behind a gateway per worker; retrieval is a tool."""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from recorded import Application, Arm, Engine, How
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_gateway import GatewayOptions, GatewayServer

Items = list[dict[str, Any]]

_UNKNOWN = ("names no response", "the response cannot be looked up")
"""In the gateway's errors for a response that it does not know, or not now."""
_REST = "\n" + "Nothing else stands in this document. " * 8
"""Behind short passages: results under 256 characters never become references."""


class GatewayApplication(Application):
    """It continues the response of the state. If the gateway does not know that one, it shows its own messages."""

    needs = ("aiohttp", "uvicorn")
    refers_to_results = True

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        os.environ.setdefault("WARMPREFIX_STORE_BUDGET", "1.0")
        options = GatewayOptions(
            (engine.base_url,),
            port=0,
            tenant_header="x-tenant",
            engine="vllm",
            salt_key=b"of all gateways",
            redis_url=engine.redis_url if arm == "record" else None,
            references="off" if arm == "without" else "exact",
        )
        self._gateway = GatewayServer(options).__enter__()
        self._url = f"{self._gateway.base_url}/responses"
        self._client = httpx.Client(timeout=60)
        self._async_client = httpx.AsyncClient(timeout=60)

    def turn(
        self,
        state: Any,
        question: str,
        passages: Sequence[ContextBlock],
        *,
        conversation: str,
        tenant: str | None,
        how: How,
    ) -> Any:
        history: Items = state["items"] if state else []
        after = state["id"] if state and self.arm != "shown" else None
        items = [*_retrieved(passages), {"role": "user", "content": question}]
        headers = {"x-tenant": str(tenant)}
        answer = self._answered(self._body(items if after else [*history, *items], after), headers, how)
        if answer is not None and any(words in answer.text for words in _UNKNOWN):
            answer = self._answered(self._body([*history, *items], None), headers, how)
        if answer is None:
            return None
        response = answer.raise_for_status().json()
        return {"items": [*history, *items, *response["output"]], "id": response["id"]}

    def _answered(self, body: dict[str, Any], headers: dict[str, str], how: How) -> httpx.Response | None:
        if how == "cancel":
            return self.cancelled(self._aanswer(body, headers))
        return self._answer(body, headers, how)

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Begin a new history with the newest part of the messages, or without it."""
        items = state["items"]
        ends = [place for place, item in enumerate(items, 1) if item.get("role") == "assistant"][:-1]
        if not ends:
            return None
        place = rng.choice(ends)
        return {"items": items[place:] if rng.random() < 0.5 else items[:place], "id": None}

    def close(self) -> None:
        self._client.close()
        self.run(self._async_client.aclose())
        self._gateway.__exit__(None, None, None)
        super().close()

    def _body(self, items: Items, after: str | None) -> dict[str, Any]:
        body = {"model": self.engine.model, "input": items}
        return body if after is None else {**body, "previous_response_id": after}

    def _answer(self, body: dict[str, Any], headers: dict[str, str], how: How) -> httpx.Response | None:
        if how == "plain":
            return self._client.post(self._url, json=body, headers=headers)
        with self._client.stream("POST", self._url, json={**body, "stream": True}, headers=headers) as stream:
            if stream.status_code != 200:
                stream.read()
                return stream
            for line in stream.iter_lines():
                if how == "close" and "output_text.delta" in line:
                    return None
                if line.startswith("data: {") and "response.completed" in line[:60]:
                    return httpx.Response(200, json=json.loads(line[6:])["response"], request=stream.request)
        return None

    async def _aanswer(self, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        return await self._async_client.post(self._url, json=body, headers=headers)


def _retrieved(passages: Sequence[ContextBlock]) -> Items:
    """Return the calls that retrieved passages, and their results."""
    calls: Items = []
    results: Items = []
    for passage in passages:
        id = f"call_{uuid.uuid4().hex}"
        arguments = json.dumps({"id": passage.id or passage.fingerprint.hex()})
        calls.append({"type": "function_call", "call_id": id, "name": "fetch", "arguments": arguments})
        results.append({"type": "function_call_output", "call_id": id, "output": _long(passage.text)})
    return [*calls, *results]


def _long(text: str) -> str:
    return text if len(text) >= 256 else text + _REST
