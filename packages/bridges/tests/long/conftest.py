"""Fixtures of the core's long tests."""

from demo_services import library as library, serve as serve
