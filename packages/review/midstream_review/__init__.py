"""Reviews policies: hits, marks, replays."""
