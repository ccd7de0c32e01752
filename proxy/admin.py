"""The admin port: is the proxy alive, should it get traffic, what has it counted, what is open. Never any content."""

import asyncio
import hmac
from typing import Annotated, Protocol

import msgspec
from fastapi import Depends, FastAPI, Header, HTTPException, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.counters import Overview
from proxy.metrics import ProxyMetrics
from proxy.upstream import Probe


class Served(Protocol):
    """What the admin port speaks of: one worker in this process, or several in their own."""

    @property
    def draining(self) -> bool: ...

    async def look(self, *, streams: bool = False) -> Overview:
        """Ask the workers, for no longer than a moment; one that does not answer stands as it last said."""


def build_admin(served: Served, upstream: Probe, published: ProxyMetrics, token: str | None) -> FastAPI:
    admin = FastAPI(title="SparSEEty proxy", docs_url=None, redoc_url=None, openapi_url=None)
    expected = None if token is None else f"Bearer {token}".encode()

    def trusted(authorization: Annotated[str, Header()] = "") -> bool:
        return expected is None or hmac.compare_digest(authorization.encode("latin-1"), expected)

    def need_token(is_trusted: Annotated[bool, Depends(trusted)]) -> None:
        if not is_trusted:
            raise HTTPException(401, "give the admin token", {"WWW-Authenticate": "Bearer"})

    @admin.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process lives. Says nothing of the upstream: to restart the proxy would not mend that."""
        return {"status": "ok"}

    @admin.get("/readyz")
    async def readyz(is_trusted: Annotated[bool, Depends(trusted)]) -> JSONResponse:
        """Answers everyone, for a kubelet cannot be given a secret; the reasons are for those who have the token."""
        reasons = ["draining"] if served.draining else []
        reasons += (await served.look()).troubles()
        if trouble := await upstream.trouble():
            reasons.append(f"upstream: {trouble}")
        told = {"ready": not reasons} | ({"reasons": reasons} if is_trusted else {})
        return JSONResponse(told, status_code=503 if reasons else 200)

    @admin.get("/metrics", dependencies=[Depends(need_token)])
    async def metrics() -> Response:
        await asyncio.gather(served.look(), upstream.refresh())
        return Response(await published.text(), media_type=CONTENT_TYPE_LATEST)

    @admin.get("/streams", dependencies=[Depends(need_token)])
    async def streams() -> Response:
        reports = (await served.look(streams=True)).reports
        found = sorted((stream for report in reports for stream in report.streams), key=lambda each: each.began)
        return Response(msgspec.json.encode({"streams": found}), media_type="application/json")

    return admin
