"""Fixtures of services and environments, which packages share."""

from demo_services import library as library, serve as serve
