"""Has the routes that the page adds to the API."""

from typing import Any

from . import feed, files, norms, session

ROUTES: list[Any] = [*files.ROUTES, *session.ROUTES, *feed.ROUTES, *norms.ROUTES]
