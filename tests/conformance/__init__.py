"""The shared suite itself: what it finds."""
