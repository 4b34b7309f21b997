"""What is stored under a name: modules, source runs, probes, every kind from a folder."""
