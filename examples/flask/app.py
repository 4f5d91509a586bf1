"""Limits in a Flask application, counted once for all of its workers.

gunicorn --workers 2 --chdir examples/flask app:app
"""

import os

from flask import Flask
from tidegate.flask import Tidegate, rate_limit

app = Flask(__name__)
gate = Tidegate(app, default="100/minute")  # each client, over all routes


@app.post("/password/reset")
@rate_limit("5/hour; 20/day", prefix="reset")
def reset() -> dict[str, str | int]:
    return {"sent": "a letter, if there is such an account", "worker": os.getpid()}


@app.get("/health")
@gate.exempt
def health() -> str:
    return "ok"
