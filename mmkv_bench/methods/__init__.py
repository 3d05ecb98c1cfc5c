"""Methods: compressors built from a configuration or a user's file, rules on their parts, checks of their promises."""
