"""Entry point to inspect workers from a terminal: `celery -A midstream.workers.remote inspect
midstream_engine`.

Importing it registers Midstream's commands with Celery's command line. Redis's URL, password and
TLS come from the settings.
"""

from ..broker.queue.celery_app import make_app
from ..schemas.settings.settings import load_settings
from . import remote_control

__all__ = ["app", "remote_control"]

app = make_app(load_settings())
