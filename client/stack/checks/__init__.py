"""The checks that `midstream doctor`, `verify` and `demo` run."""
