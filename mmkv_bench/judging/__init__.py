"""Judges: models that scorers ask about an answer, behind any endpoint with OpenAI's chat completions.

Judges are asked only in the score stage, in rounds (see `answers.py`). A pass through the scorer collects its questions, these
are asked concurrently, and the next pass gets the answers. A question without an answer never becomes a score.
"""
