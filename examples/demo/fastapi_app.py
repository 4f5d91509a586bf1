"""The demo's FastAPI application: limited by the rules file that TIDEGATE_CONFIG names."""

import os

from fastapi import FastAPI
from tidegate.fastapi import TidegateMiddleware

app = FastAPI()
app.add_middleware(TidegateMiddleware)


@app.get("/api/tides/{port}")
async def tide(port: str) -> dict[str, object]:
    return {"port": port, "worker": os.getpid()}


@app.post("/api/tides/{port}")
def report(port: str) -> dict[str, object]:
    return {"port": port, "worker": os.getpid(), "stored": True}
