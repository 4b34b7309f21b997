"""Midstream: activation steering, capture and patching on stock vLLM, as a job service."""

__version__ = "0.1.0"
