"""Lua scripts' arguments, the job's record, durability, tenants, priorities of jobs."""
