"""`midstream up`: processes on this machine; `doctor`, and what it plans."""
