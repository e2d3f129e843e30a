"""The routes for stored responses and conversations of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator.answers import Json
from warmprefix_tools.emulator.engine import EmulatorEngine
from warmprefix_tools.emulator.openai_bodies import ConversationRequest, ItemsRequest
from warmprefix_tools.emulator.serving import RefusedError, parsed
from warmprefix_tools.emulator.stored_items import StoredConversation, page_of, with_ids

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["INVALID", "item_routes", "not_found_as", "owner_of", "unknown"]

INVALID = "invalid_request_error"
"""The type of OpenAI's refusals."""


def item_routes(engine: EmulatorEngine) -> list[Route]:
    """Return the routes."""
    response, conversation = "/v1/responses/{response}", "/v1/conversations/{conversation}"
    item = conversation + "/items/{item}"
    answers = [
        ("GET", response, _retrieve_response),
        ("DELETE", response, _delete_response),
        ("GET", f"{response}/input_items", _list_input_items),
        ("POST", "/v1/conversations", _create_conversation),
        ("GET", conversation, _retrieve_conversation),
        ("POST", conversation, _update_conversation),
        ("DELETE", conversation, _delete_conversation),
        ("POST", f"{conversation}/items", _create_items),
        ("GET", f"{conversation}/items", _list_items),
        ("GET", item, _retrieve_item),
        ("DELETE", item, _delete_item),
    ]
    return [Route(path, partial(answer, engine), methods=[method]) for method, path, answer in answers]


def owner_of(request: Request) -> str | None:
    """Return what keeps apart what is stored for different API keys."""
    return request.headers.get("authorization")


def unknown(what: str, name: str, param: str | None = None) -> RefusedError:
    """Return the refusal of an unknown id."""
    return RefusedError(404, f"{what} with id '{name}' not found.", kind=INVALID, param=param)


@contextmanager
def not_found_as(refusal: RefusedError) -> Iterator[None]:
    """Raise this refusal in place of the store's KeyError."""
    try:
        yield
    except KeyError as error:
        raise refusal from error


# -- responses ---------------------------------------------------------------------------------------------------------


async def _retrieve_response(engine: EmulatorEngine, request: Request) -> Response:
    name = request.path_params["response"]
    with not_found_as(unknown("Response", name)):
        return JSONResponse(engine.items.response(owner_of(request), name).body)


async def _delete_response(engine: EmulatorEngine, request: Request) -> Response:
    name = request.path_params["response"]
    with not_found_as(unknown("Response", name)):
        engine.items.delete(owner_of(request), name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


async def _list_input_items(engine: EmulatorEngine, request: Request) -> Response:
    name = request.path_params["response"]
    with not_found_as(unknown("Response", name)):
        items = engine.items.input_items(engine.items.response(owner_of(request), name))
    return _page(request, items)


# -- conversations -----------------------------------------------------------------------------------------------------


async def _create_conversation(engine: EmulatorEngine, request: Request) -> Response:
    body = await parsed(request, ConversationRequest, engine.config)
    conversation = StoredConversation(int(time.time()), body.metadata, with_ids(body.items or []))
    engine.items.begin_conversation(owner_of(request), conversation)
    return JSONResponse(conversation.body)


async def _retrieve_conversation(engine: EmulatorEngine, request: Request) -> Response:
    return JSONResponse(_conversation(engine, request).body)


async def _update_conversation(engine: EmulatorEngine, request: Request) -> Response:
    body, conversation = await parsed(request, ConversationRequest, engine.config), _conversation(engine, request)
    conversation.metadata = body.metadata
    return JSONResponse(conversation.body)


async def _delete_conversation(engine: EmulatorEngine, request: Request) -> Response:
    name = request.path_params["conversation"]
    with not_found_as(unknown("Conversation", name)):
        engine.items.end_conversation(owner_of(request), name)
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


async def _create_items(engine: EmulatorEngine, request: Request) -> Response:
    body, conversation = await parsed(request, ItemsRequest, engine.config), _conversation(engine, request)
    items = with_ids(body.items)
    conversation.items += items
    return JSONResponse(page_of(items, len(items), "asc", None))


async def _list_items(engine: EmulatorEngine, request: Request) -> Response:
    return _page(request, _conversation(engine, request).items)


async def _retrieve_item(engine: EmulatorEngine, request: Request) -> Response:
    conversation = _conversation(engine, request)
    return JSONResponse(conversation.items[_place(conversation, request)])


async def _delete_item(engine: EmulatorEngine, request: Request) -> Response:
    conversation = _conversation(engine, request)
    del conversation.items[_place(conversation, request)]
    return JSONResponse(conversation.body)


def _conversation(engine: EmulatorEngine, request: Request) -> StoredConversation:
    name = request.path_params["conversation"]
    with not_found_as(unknown("Conversation", name)):
        return engine.items.conversation(owner_of(request), name)


def _place(conversation: StoredConversation, request: Request) -> int:
    name = request.path_params["item"]
    place = next((place for place, item in enumerate(conversation.items) if item["id"] == name), None)
    if place is None:
        raise unknown("Item", name)
    return place


def _page(request: Request, items: Sequence[Json]) -> Response:
    limit, order = request.query_params.get("limit", "20"), request.query_params.get("order", "desc")
    if not (limit.isdecimal() and 1 <= int(limit) <= 100):
        raise RefusedError(400, "'limit' must be from 1 to 100.", kind=INVALID, param="limit")
    if order not in ("asc", "desc"):
        raise RefusedError(400, "'order' must be 'asc' or 'desc'.", kind=INVALID, param="order")
    after = request.query_params.get("after")
    with not_found_as(unknown("Item", str(after), "after")):
        return JSONResponse(page_of(items, int(limit), order, after))
