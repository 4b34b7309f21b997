"""Routes, replays."""
