"""Do the tests still hold what they held? Small wrong changes of product lines, and which test notices each.

See tools/mutations/README.md for the lists in git and how they were made.
"""
