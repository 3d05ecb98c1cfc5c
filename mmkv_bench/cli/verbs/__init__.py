"""One file per verb: SUMMARY, `options(parser)` and `answer(given)`; nothing heavy is imported before work begins."""
