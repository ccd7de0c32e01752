"""The admin port: is the proxy alive, should it get traffic, what has it counted."""

from collections.abc import Callable

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from proxy.upstream import Upstream
from sparseety.logwriter import LogWriter


def build_admin(
    upstream: Upstream, writer: LogWriter, registry: CollectorRegistry, draining: Callable[[], bool]
) -> FastAPI:
    admin = FastAPI(title="SparSEEty proxy", docs_url=None, redoc_url=None, openapi_url=None)

    @admin.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process lives. Says nothing of the upstream: to restart the proxy would not mend that."""
        return {"status": "ok"}

    @admin.get("/readyz")
    async def readyz() -> JSONResponse:
        reasons = []
        if draining():
            reasons.append("draining")
        if not writer.healthy:
            reasons.append("the capture log cannot be written")
        if trouble := await upstream.trouble():
            reasons.append(f"upstream: {trouble}")
        return JSONResponse({"ready": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)

    @admin.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return admin
