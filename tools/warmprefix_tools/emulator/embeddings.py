"""OpenAI's embeddings: vectors of hashed tokens, so that texts with the same words are near each other."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator.answers import Json
from warmprefix_tools.emulator.engine import EmulatorEngine
from warmprefix_tools.emulator.openai_bodies import EmbeddingsRequest
from warmprefix_tools.emulator.serving import parsed

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["create_embeddings"]


async def create_embeddings(engine: EmulatorEngine, request: Request) -> Response:
    """Answer `POST /v1/embeddings`; no cache has a part in it."""
    body = await parsed(request, EmbeddingsRequest, engine.config)
    data: list[Json] = []
    for index, tokens in enumerate(body.token_lists):
        vector: list[float] | str = _vector(tokens, body.dimensions)
        if body.encoding_format == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    count = sum(map(len, body.token_lists))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": engine.config.model, "usage": usage})


def _vector(tokens: Sequence[int], dimensions: int) -> list[float]:
    """Return a vector of length 1; each token counts at one place, with one sign."""
    vector = [0.0] * dimensions
    for token in tokens:
        mixed = token * 2_654_435_761 % 2**32  # Knuth's multiplicative hash
        vector[(mixed >> 1) % dimensions] += 1.0 if mixed & 1 else -1.0
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else [1.0, *vector[1:]]
