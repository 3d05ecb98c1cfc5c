"""Progress bars and advice of libraries do not belong among ours; their errors still reach us as exceptions."""

from __future__ import annotations

import logging
import os
import sys


def quiet_libraries() -> None:
    """Quieten the Hugging Face libraries, those that are imported already and those that will be."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("TRANSFORMERS_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try; the last one's error is ours
    if "transformers" in sys.modules:
        quiet_transformers()


def quiet_transformers() -> None:
    """The same of transformers alone, which is imported for it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
