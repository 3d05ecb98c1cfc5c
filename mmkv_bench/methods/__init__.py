"""Methods: a configured method, or a user's file, as the compressor that it is, and what may be composed with what."""
