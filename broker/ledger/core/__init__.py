"""Lua scripts' arguments, the job's record, durability, tenants, the order of dispatch."""
