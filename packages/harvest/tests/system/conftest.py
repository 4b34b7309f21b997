"""Fixtures of the core's system tests."""

from fixtures import (
    api as api,
    api_session as api_session,
    hand as hand,
    redis_session as redis_session,
    redis_url as redis_url,
    rig as rig,
)
from stack import client as client
