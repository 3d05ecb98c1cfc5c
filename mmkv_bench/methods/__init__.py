"""Methods: compressors built from a configuration or a user's file, rules on which parts go together, and checks of what
every method promises."""
