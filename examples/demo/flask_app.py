"""The demo's Flask application: limited by the rules file that TIDEGATE_CONFIG names."""

import os

from flask import Flask
from tidegate.flask import Tidegate

app = Flask(__name__)
Tidegate(app, config=os.environ["TIDEGATE_CONFIG"])


@app.route("/shop/<item>", methods=["GET", "POST"])
def item(item: str) -> dict[str, object]:
    return {"item": item, "worker": os.getpid()}
