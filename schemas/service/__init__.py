"""The service's reports on itself: health, status, compatibility."""
