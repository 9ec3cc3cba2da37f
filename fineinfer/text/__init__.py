"""text room."""
