"""Judges: models that scorers ask about an answer, behind any endpoint that speaks OpenAI's chat completions.

Asking happens in the score stage only, in rounds (see `answers.py`): a pass through the scorer collects its questions,
they are asked side by side, and the next pass finds the answers. A question without an answer never becomes a score.
"""
