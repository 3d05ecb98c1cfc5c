"""Checks of what is stored: answers made again and compared."""
