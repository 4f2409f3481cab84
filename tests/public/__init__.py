"""What is public, recorded: docs/compatibility.md says what may change when."""
