"""Configuration -> cells -> jobs."""
