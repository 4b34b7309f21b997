"""Review of policies: their hits, marks of people, and replays of a version before it acts."""
