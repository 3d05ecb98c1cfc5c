"""The commands: one tree of verbs with one grammar, each verb one file that calls the room which does the work."""
