"""The commands: one tree of verbs with one grammar. Each verb is one file that calls the package with its work."""
