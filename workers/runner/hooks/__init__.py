"""Where hook points are: architectures, discovery, installation at sites."""
