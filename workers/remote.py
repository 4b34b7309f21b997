"""Entry point to inspect workers from a terminal: `celery -A midstream.workers.remote inspect
midstream_engine`.

Celery's command line knows a command of ours once it is imported, and Redis with its password and
TLS from the environment's settings.
"""

from ..broker.queue.celery_app import make_app
from ..schemas.base.settings import load_settings
from .serving import remote_control

__all__ = ["app", "remote_control"]

app = make_app(load_settings())
