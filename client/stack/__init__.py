"""`midstream up`: processes on this machine; `verify`; `doctor --plan`."""
