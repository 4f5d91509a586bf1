"""Two limits in a FastAPI application, counted once for all of its workers.

uvicorn --workers 2 --app-dir examples/fastapi app:app
"""

import os

from fastapi import Depends, FastAPI
from tidegate.fastapi import install, rate_limit

app = FastAPI()
install(app)  # X-RateLimit fields on every limited answer


@app.get("/search", dependencies=[Depends(rate_limit("100/minute"))])
async def search(q: str = "") -> dict[str, str | int]:
    return {"query": q, "worker": os.getpid()}


@app.post("/password/reset", dependencies=[Depends(rate_limit("5/hour; 20/day", prefix="reset"))])
def reset() -> dict[str, str | int]:
    return {"sent": "a letter, if there is such an account", "worker": os.getpid()}
