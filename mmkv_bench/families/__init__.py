"""Model families: one file states a family's facts and rules, from token ids to the boxes of its visual tokens."""
