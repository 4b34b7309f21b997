"""Code that lives inside vLLM's rank processes: what is changed and recorded in the forward
pass.
"""
