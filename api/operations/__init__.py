"""State of the service: global steering, disks, agreement of ranks."""
