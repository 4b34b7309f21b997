"""Fixtures of the core's system tests."""

from stack import client as client
