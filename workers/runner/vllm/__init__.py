"""What touches vLLM's step: worker class, runners, scheduler, CUDA graphs, KV blocks."""
