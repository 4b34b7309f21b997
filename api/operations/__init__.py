"""State of the service: global steering, disks, the page's figures, agreement of ranks."""
