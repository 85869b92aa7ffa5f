"""The OpenAI API of a node: chat completions, completions, models, and health."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from p2pshard.errors import Internal, InvalidRequest, ModelNotFound, P2PShardError, Unauthenticated
from p2pshard.transport.generated import control_pb2
from p2pshard.version import __version__

from ..gateway.gateway import Gateway
from ..gateway.view import ClusterView
from .answers import Answer, ChatAnswer, CompletionAnswer
from .body import UnreadBody, read_json
from .disconnect import Disconnected, while_connected
from .errors import error_body
from .schemas import ChatBody, CompletionBody, parse_chat, parse_completion
from .sse import EventStream

__all__ = ["create_app", "error_response"]

log = logging.getLogger(__name__)


def create_app(gateway: Gateway, view: ClusterView) -> FastAPI:
    """The app of one node. It answers as soon as the daemon runs; a model that loads is waited for."""
    app = FastAPI(title="p2pshard", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    @app.exception_handler(P2PShardError)
    async def _ours(request: Request, error: P2PShardError) -> Response:
        return error_response(error)

    @app.exception_handler(Disconnected)
    async def _left(request: Request, error: Disconnected) -> Response:
        return Response(status_code=499)  # nobody reads it; the number is for logs

    @app.exception_handler(HTTPException)
    async def _framework(request: Request, error: HTTPException) -> Response:
        ours = InvalidRequest(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(error_body(ours), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> Response:
        return error_response(Internal(f"{type(error).__name__}: {error}"))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(request, gateway, view, parse_chat(await read_json(request)), ChatAnswer)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(
            request, gateway, view, parse_completion(await read_json(request)), CompletionAnswer
        )

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(d, started) for d in view.deployments()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        deployment = view.find(model)
        if deployment is None:
            raise ModelNotFound(
                f"model {model!r} is not deployed; type: p2pshard deploy {model}", field="model"
            )
        return JSONResponse(_model(deployment, started))

    @app.get("/health")
    async def health() -> Response:
        """200 while the daemon runs; what it serves is in the body."""
        return JSONResponse(
            {
                "status": "ok",
                "node": gateway.node_id,
                "version": __version__,
                "members": len(view.members()),
                "deployments": {d.model: d.state for d in view.deployments()},
                "requests": len(gateway.ps()),
            }
        )

    return app


async def _answer(
    request: Request, gateway: Gateway, view: ClusterView, body: ChatBody | CompletionBody, form: type[Answer]
) -> Response:
    """Answer whole or as a stream; an error before the first event keeps its HTTP status."""
    message = body.to_request()
    events = gateway.generate(message)
    try:
        first = await while_connected(request, events.__anext__())
        text = await gateway.text_model(first.resume.manifest)
        answer = form(
            first.resume,
            body.model,
            text,
            logprobs=message.sampling.logprobs,
            include_usage=body.include_usage,
        )
        if body.stream:
            return EventStream(answer.chunks(events), events)
        return JSONResponse(await while_connected(request, answer.collect(events)))
    except BaseException:
        await events.aclose()
        raise


def error_response(error: P2PShardError) -> Response:
    """An error as OpenAI's clients expect it."""
    headers = {}
    if (after := error.details.get("retry_after_s")) is not None:
        headers["retry-after"] = str(math.ceil(after))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnreadBody):
        headers["connection"] = "close"
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


def _model(deployment: control_pb2.Deployment, created: int) -> dict[str, Any]:
    """OpenAI's four fields, and what was chosen for the deployment."""
    planned = bool(deployment.plan.replicas)
    return {
        "id": deployment.model,
        "object": "model",
        "created": created,
        "owned_by": "p2pshard",
        "state": deployment.state,
        "reason": deployment.reason,
        "context": deployment.plan.context if planned else None,
        "concurrency": deployment.plan.concurrency if planned else None,
        "dtype": deployment.plan.dtype if planned else None,
        "numerics": deployment.plan.numerics if planned else None,
        "nodes": len({r.node for s in deployment.plan.replicas[0].stages for r in s.ranks}) if planned else 0,
    }
