"""What a run will do, before anything is loaded: its checked configuration, cells with their identities, shards."""
