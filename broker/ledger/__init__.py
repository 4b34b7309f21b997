"""The state of every job in Redis; a Lua script in `lua/` makes each change or refuses it."""
