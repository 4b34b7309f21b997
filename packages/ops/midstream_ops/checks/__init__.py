"""The checks that `midstream doctor` and `demo` run."""
