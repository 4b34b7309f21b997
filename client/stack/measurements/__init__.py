"""The measurements of `midstream verify`: costs, rows, files, and the facts of its page."""
