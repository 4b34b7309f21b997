"""Tests only: lets vLLM's v2 runner run on a CPU, through Triton's interpreter.

Never part of the product.

Put the parent folder on PYTHONPATH and set TRITON_INTERPRET=1; every vLLM started so takes the v2
runner.
"""
